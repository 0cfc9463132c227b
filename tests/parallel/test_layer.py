"""ParallelMoE: what it compiles to, and what it refuses. The forms themselves are in test_forms.py."""

import re

import pytest

from moe_ops.parallel import ParallelSizes
from moe_ops.testing import assert_bits_equal
from moe_ops.testing.parallel_cases import ParallelCase, run_padded, run_parallel_compiled
from moe_ops.testing.parallel_refusals import refusals


@pytest.mark.parametrize(
    "sizes, dispatch, tokens",
    [
        (ParallelSizes(attn_dp=2, moe_tp=2), "standard", (9, 8)),
        (ParallelSizes(attn_tp=2, moe_tp=2), "standard", (9,)),
        (ParallelSizes(attn_tp=2, ep=2), "deepep_ll", (9,)),
    ],
    ids=["gather-reduce_scatter", "all_reduce", "split-all_gather"],
)
def test_layer_is_one_graph_for_every_token_count(ranks, sizes, dispatch, tokens):
    for graphs, same in ranks.run(2, run_parallel_compiled, ParallelCase(sizes, dispatch, tokens), "aot_eager"):
        assert graphs == 1 and same == [True] * 3


def test_layer_pads_and_cuts_what_the_groups_do_not_divide(ranks):
    for got, want in ranks.run(2, run_padded):
        assert got.shape == (9, 200)
        assert_bits_equal(got, want)


def test_layer_explains_itself(ranks):
    """Each wrong layer or call on two ranks, and the sentence that refuses it there."""
    for name, kind, got, want in (row for rows in ranks.run(2, refusals) for row in rows):
        assert kind == "ValueError" and re.search(want, got), f"{name}: {kind}: {got}"
