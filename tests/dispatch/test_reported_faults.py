"""Families of faults that users of such systems reported, at the borders between ranks. Those that the contract test,
the refusals and the compile test already show are not repeated here."""

import pytest
import torch

from moe_ops.dispatch import FORMATS
from moe_ops.testing.dispatch_cases import DispatchCase
from moe_ops.testing.dispatch_faults import (
    run_compiled_empty,
    run_handover,
    run_interleaved,
    run_padded_rows,
    run_untouched,
)

EXCHANGING = [name for name, form in FORMATS.items() if form.reduces]
formats = pytest.mark.parametrize("name", EXCHANGING)


@formats
def test_identical_padding_rows_take_no_room(ranks, name):
    """8 real rows of 256 on each of two ranks: the padding's ids are -1 before anything is counted."""
    case = DispatchCase(name, "bf16", (256, 256), K=128, max_tokens=256)
    outcome = ranks.run(2, run_padded_rows, case, 8)
    assert sum(rows for rows, _, _ in outcome) == 2 * 8 * case.top_k
    assert [rest for _, *rest in outcome] == [[True, True]] * 2


@formats
def test_calls_that_overlap_keep_their_own_row_maps(ranks, name):
    case = DispatchCase(name, "fp8_block", (8, 5), distribution="repeated")
    assert ranks.run(2, run_interleaved, case) == [[True, True]] * 2


@pytest.mark.parametrize("name", FORMATS)
def test_inputs_keep_their_storage_and_their_bits(ranks, name):
    case = DispatchCase(name, "fp8_block", (5, 0), distribution="foreign")
    assert ranks.run(2, run_untouched, case) == [[True] * 3] * 2


@pytest.mark.parametrize("tokens", [(5, 3), (0, 0)], ids=["tokens", "none"])
@pytest.mark.parametrize("payload", ["fp8", "bf16"])
@pytest.mark.parametrize("name", [name for name, form in FORMATS.items() if "fp8" in form.payloads])
def test_experts_get_rows_quantised_once_however_they_travelled(ranks, name, payload, tokens):
    case = DispatchCase(name, "fp8_block", tokens, payload=payload)
    for dtype, scaled, shape in ranks.run(2, run_handover, case):
        assert dtype == torch.float8_e4m3fn
        assert scaled == (0 not in shape)
    case = DispatchCase(name, "bf16", tokens)
    assert {got[:2] for got in ranks.run(2, run_handover, case)} == {(torch.bfloat16, False)}


def test_buffers_are_sized_by_local_experts(ranks):
    """128 experts, 64 of them here."""
    case = DispatchCase("deepep_ll", "bf16", (2, 2), E=128, K=128)
    assert [shape for *_, shape in ranks.run(2, run_handover, case)] == [(64, 128, 128)] * 2
    case = DispatchCase("standard", "bf16", (2, 2), E=128, K=128, layout="masked")
    assert [shape for *_, shape in ranks.run(2, run_handover, case)] == [(64, 128, 128)] * 2


@pytest.mark.parametrize("name", ["deepep_ll", "deepep_v2_expanded"])
def test_compiled_ranks_without_a_token_stay_in_step(ranks, name):
    """One rank has none at first, then none has any."""
    case = DispatchCase(name, "bf16", (5, 0), K=128)
    assert ranks.run(2, run_compiled_empty, case) == [[(5, 128), (0, 128)], [(0, 128), (0, 128)]]
