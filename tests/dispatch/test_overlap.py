"""Parts of the tokens, overlapped: the bits of the parts one by one, and settings that go back to what they were."""

import pytest
import torch

from moe_ops import dispatch
from moe_ops.csrc_stubs import deep_gemm as stand_in
from moe_ops.dispatch import FORMATS, Overlap
from moe_ops.dispatch.overlap import run_in_parts, shared_sms
from moe_ops.kernels import deep_gemm
from moe_ops.parallel import ParallelSizes
from moe_ops.recipes import RECIPES
from moe_ops.testing import assert_bits_equal, relative_error
from moe_ops.testing.dispatch_cases import DispatchCase, run_overlapped
from moe_ops.testing.parallel_cases import ParallelCase, run_parallel_overlapped

EXCHANGING = [name for name, form in FORMATS.items() if form.reduces]


@pytest.mark.parametrize("name", EXCHANGING)
def test_overlap_changes_no_bit(ranks, name):
    """Ranks with fewer tokens than parts, and with none."""
    for recipe, parts in (("bf16", 2), ("fp8_block", 3)):
        case = DispatchCase(name, recipe, (8, 0, 5, 1), distribution="repeated")
        outs = ranks.run(4, run_overlapped, case, parts)
        for one_by_one, overlapped in outs:
            assert_bits_equal(overlapped, one_by_one, str(case))
        inputs, weights = case.build()
        judge = case.layer.judge(inputs, weights, routed_scaling_factor=case.scaling)
        assert relative_error(torch.cat([out for _, out in outs]), judge) < case.layer.max_diff


@pytest.mark.parametrize(
    "case",
    [
        ParallelCase(ParallelSizes(attn_dp=4, ep=4), "deepep_ll", (5, 0, 3, 1)),
        ParallelCase(ParallelSizes(attn_dp=2, attn_tp=2, ep=4), "deepep_normal", (9, 4)),
    ],
    ids=str,
)
def test_overlapped_layer_equals_the_whole(ranks, case):
    outs = ranks.run(4, run_parallel_overlapped, case)
    judged, _ = case.expected()
    got = torch.cat(outs[:: case.sizes.attn_tp])
    assert relative_error(got, judged) < RECIPES[case.recipe].max_diff


class Order:
    """A dispatcher that notes its calls."""

    def __init__(self):
        self.calls = []

    def dispatch(self, x):
        self.calls.append(("dispatch", len(x)))
        return x

    def combine(self, out, state):
        self.calls.append(("combine", len(out)))
        return out


def test_overlap_sends_ahead_of_the_combine_before():
    order = Order()

    def stages(here, experts, state):
        here.calls.append(("experts", len(state)))
        return state + 1

    got = run_in_parts(order, None, stages, Overlap(3), torch.zeros(7, 2))
    assert torch.equal(got, torch.ones(7, 2))
    steps = ["dispatch 3", "experts 3", "dispatch 3", "combine 3", "experts 3", "dispatch 1", "combine 3"]
    assert [f"{what} {n}" for what, n in order.calls] == [*steps, "experts 1", "combine 1"]


class Buffer:
    num_sms = 20

    @classmethod
    def set_num_sms(cls, n):
        cls.num_sms = n


def test_sms_are_shared_within_and_given_back_after_an_error():
    with deep_gemm.use(stand_in), stand_in.arch(9):
        every = stand_in.get_num_sms()
        with pytest.raises(KeyError), shared_sms(Overlap(communication_sms=24, buffer=Buffer)):
            assert (Buffer.num_sms, stand_in.get_num_sms()) == (24, every - 24)
            raise KeyError
        assert (Buffer.num_sms, stand_in.get_num_sms()) == (20, every)
        with pytest.raises(ValueError, match=f"^Overlap: communication_sms must be fewer than the card's {every}"):
            with shared_sms(Overlap(communication_sms=every, buffer=Buffer)):
                pass
        assert (Buffer.num_sms, stand_in.get_num_sms()) == (20, every)
    with shared_sms(Overlap(buffer=Buffer)):
        assert Buffer.num_sms == 20


def test_overlap_explains_itself():
    with pytest.raises(ValueError, match="^Overlap: parts must be at least 2; got 1"):
        Overlap(1)
    with pytest.raises(ValueError, match="^Overlap: communication_sms must be positive and even; got 3"):
        Overlap(communication_sms=3)
    compiled = torch.compile(
        lambda x: dispatch.run(Order(), None, x, x, x, overlap=Overlap()), fullgraph=True, backend="eager"
    )
    with pytest.raises(Exception, match="overlap must be None in a compiled graph"):
        compiled(torch.zeros(4, 2))
