"""Every way to cut four ranks, against the layer in one process."""

import pytest
import torch

from moe_ops.dispatch import FORMATS
from moe_ops.parallel import ParallelSizes, decide, every_size, table
from moe_ops.recipes import get_recipe
from moe_ops.testing import assert_bits_equal, relative_error
from moe_ops.testing.parallel_cases import ParallelCase, run_parallel, run_parallel_routes

TOKENS = {1: (9,), 2: (5, 4), 4: (5, 0, 3, 1)}


def cases(world, dispatches):
    for sizes in every_size(world):
        for dispatch in dispatches:
            if FORMATS[dispatch].reduces and sizes.moe_tp > 1:
                continue
            form = decide(sizes, dispatch)
            for uneven in (False, True) if form.before == "gather" else (False,):
                for shared in ("replicated", "sharded") if form.exchange == "local" and not uneven else ("replicated",):
                    yield ParallelCase(sizes, dispatch, TOKENS[sizes.token_groups], uneven=uneven, shared=shared)


def check(ranks, case):
    """Ranks of one token group agree; together they give the layer's result."""
    outs = ranks.run(case.sizes.world, run_parallel, case)
    groups = [outs[i : i + case.sizes.attn_tp] for i in range(0, len(outs), case.sizes.attn_tp)]
    for same in groups:
        for out in same[1:]:
            assert_bits_equal(out, same[0], f"{case}: ranks with the same tokens")
    got = torch.cat([same[0] for same in groups])
    judged, one_process = case.expected()
    assert relative_error(got, judged) < get_recipe("test", case.recipe).max_diff, str(case)
    if case.sizes.world == 1 or FORMATS[case.dispatch].sums == "rows":
        assert_bits_equal(got, one_process, str(case))


@pytest.mark.parametrize("case", list(cases(4, ("standard", "deepep_ll", "deepep_normal"))), ids=str)
def test_form_on_four_ranks(ranks, case):
    check(ranks, case)


@pytest.mark.parametrize("case", [*cases(1, ("standard", "deepep_ll")), *cases(2, ("standard", "deepep_v2"))], ids=str)
def test_form_on_fewer_ranks(ranks, case):
    check(ranks, case)


@pytest.mark.parametrize("recipe", ["fp8_block", "mxfp8", "mxfp4"])
@pytest.mark.parametrize("attention", ["attn_dp", "attn_tp"])
@pytest.mark.parametrize("experts", ["ep", "moe_tp"])
def test_form_in_every_recipe(ranks, recipe, attention, experts):
    """The four rows of the usual table: attention DP or TP, experts EP by all-to-all or TP."""
    sizes = ParallelSizes(**{attention: 4, experts: 4})
    dispatch = "deepep_ll" if experts == "ep" else "standard"
    check(ranks, ParallelCase(sizes, dispatch, TOKENS[sizes.token_groups], recipe=recipe))


@pytest.mark.parametrize("tokens", [(0, 0), (0, 9)], ids=str)
@pytest.mark.parametrize("dispatch", ["standard", "deepep_ll", "deepep_v2_masked"])
def test_form_without_tokens(ranks, dispatch, tokens):
    """Groups without a token stay in step; the fused split of nothing is nothing."""
    check(ranks, ParallelCase(ParallelSizes(attn_dp=2, attn_tp=2, ep=4), dispatch, tokens))


def test_split_routes_every_row_once_and_none_that_fills_up(ranks):
    """Nine rows over four ranks: 3, 3, 3 and 0, each with three routes."""
    case = ParallelCase(ParallelSizes(attn_tp=4, ep=4), "deepep_ll", (9,))
    assert ranks.run(4, run_parallel_routes, case) == [9, 9, 9, 0]
    case = ParallelCase(ParallelSizes(attn_tp=4, ep=4), "deepep_ll", (7,))
    assert ranks.run(4, run_parallel_routes, case) == [6, 6, 6, 3]


def test_gather_leaves_empty_slots_without_a_route(ranks):
    """Every rank sees nine tokens with three routes each, in 36 slots."""
    case = ParallelCase(ParallelSizes(attn_dp=4, moe_tp=4), "standard", (5, 0, 3, 1))
    assert ranks.run(4, run_parallel_routes, case) == [27] * 4


def test_decide_over_the_whole_table():
    """By the rules in words: one reduction, in the place that the form names; nothing on one rank."""
    for world in (1, 2, 4, 8, 16):
        for sizes in every_size(world):
            for dispatch in FORMATS:
                exchanged = dispatch != "standard"
                if exchanged and sizes.moe_tp > 1:
                    with pytest.raises(ValueError, match="^decide: moe_tp must be 1 beside an all-to-all; got"):
                        decide(sizes, dispatch)
                    continue
                for uneven in (False, True):
                    form = decide(sizes, dispatch, uneven=uneven)
                    assert (form.exchange == "all_to_all") == exchanged
                    assert (form.before == "split") == (exchanged and sizes.attn_tp > 1) == (form.after == "all_gather")
                    assert (form.before == "gather") == (not exchanged and sizes.attn_dp * sizes.attn_cp > 1)
                    assert form.reduced_in == ("nowhere" if world == 1 else "combine" if exchanged else "after")
                    sums = ("all_reduce", "reduce_scatter", "reduce_scatter_v", "all_reduce_and_cut")
                    assert (form.after in sums) == (form.reduced_in == "after")
                    assert ("scatter" in form.after) == (form.before == "gather" and sizes.attn_tp == 1)
                    assert form.after.endswith("_v") == (uneven and "scatter" in form.after)


def test_decide_prints_the_table():
    lines = table(2).splitlines()
    assert lines[0].split() == ["sizes", "dispatch", "tokens", "form"]
    assert "attn_dp=2 ep=2      deepep_ll                none -> all_to_all experts -> none" in "\n".join(lines)
    assert len(lines) == 1 + sum(1 for _ in cases(2, ("standard", "deepep_ll")) if _.shared == "replicated")


@pytest.mark.parametrize(
    "wrong, words", [(dict(attn_dp=2), "ep \\* moe_tp must be .* = 2; got 1"), (dict(ep=0), "ep must")]
)
def test_sizes_explain_themselves(wrong, words):
    with pytest.raises(ValueError, match=f"^ParallelSizes: {words}"):
        ParallelSizes(**wrong)
