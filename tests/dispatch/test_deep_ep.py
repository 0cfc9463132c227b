"""The deep_ep transport over the library's stand-in, held to the same contract; what adapter and stand-in refuse."""

import pytest
import torch

from moe_ops import dispatch
from moe_ops.dispatch import FORMATS, DeepEPTransport, ExpertSetup
from moe_ops.recipes import RECIPES
from moe_ops.testing import assert_bits_equal, relative_error
from moe_ops.testing.dispatch_cases import DispatchCase, run_case
from moe_ops.testing.stub_refusals import stub_refusals

OVER = {
    "deepep_ll": "buffer",
    "deepep_normal": "buffer",
    "deepep_v2": "elastic",
    "deepep_v2_expanded": "elastic",
    "deepep_v2_masked": "elastic",
}


def case_of(name, recipe, tokens=(5, 0, 3, 1), **more):
    """A scaling of 2 rounds nowhere, wherever it is applied. K of one packed word of scales, and of two."""
    sizes = dict(K=512, max_tokens=8, scaling=2.0, buffer=OVER[name])
    return DispatchCase(name, recipe, tokens, **{**sizes, **more})


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", OVER)
def test_deep_ep_equals_one_rank(ranks, name, recipe):
    case = case_of(name, recipe)
    got = torch.cat(ranks.run(4, run_case, case))
    inputs, weights = case.build()
    judge = case.layer.judge(inputs, weights, routed_scaling_factor=case.scaling)
    assert relative_error(got, judge) < case.layer.max_diff
    if name != "deepep_ll":  # where the library casts by itself
        assert_bits_equal(got, case.expected(FORMATS[name]), str(case))


@pytest.mark.parametrize("distribution", ["one_expert", "foreign"])
@pytest.mark.parametrize("name", OVER)
def test_deep_ep_any_routing(ranks, name, distribution):
    case = case_of(name, "fp8_block", payload="bf16", distribution=distribution, K=1024)
    assert_bits_equal(torch.cat(ranks.run(4, run_case, case)), case.expected(FORMATS[name]), str(case))


@pytest.mark.parametrize(
    "name, recipe, scale_format", [("deepep_ll", "fp8_block", "ue8m0"), ("deepep_ll", "mxfp8", "ue8m0")]
)
def test_deep_ep_casts_to_powers_of_two_as_quantize_does(ranks, name, recipe, scale_format):
    """Packed scales arrive as the GEMM reads them; for mxfp8 each of 128 columns becomes four of 32."""
    case = case_of(name, recipe, (3, 2), scale_format=scale_format, K=1024)
    assert_bits_equal(torch.cat(ranks.run(2, run_case, case)), case.expected(FORMATS[name]), str(case))


@pytest.mark.parametrize(
    "wrong, words",
    [
        (dict(max_tokens=1028), "max_tokens must be at most 1024; got 1028. The low-latency kernels count no further"),
        (dict(max_tokens=3), r"ranks \* max_tokens must be a multiple of 4; got 6. Round max_tokens up"),
        (dict(scale_format="ue8m0", K=256), "K must be a multiple of 512; got 256"),
    ],
)
def test_adapter_explains_itself(wrong, words):
    transport = DeepEPTransport.__new__(DeepEPTransport)
    transport.rank, transport.size, transport.buffer, transport.elastic = 0, 2, None, None
    fields = dict(num_experts=8, top_k=2, K=512, recipe="fp8_block", scale_format="fp32", max_tokens=8)
    with pytest.raises(ValueError, match=f"^dispatch deepep_ll: {words}"):
        dispatch.create("deepep_ll", ExpertSetup(**{**fields, **wrong}), transport)


def test_adapter_names_the_buffer_that_is_missing():
    transport = DeepEPTransport.__new__(DeepEPTransport)
    transport.rank, transport.size, transport.buffer, transport.elastic = 0, 1, None, None
    setup = ExpertSetup(8, 2, 512, "bf16", "none", max_tokens=8)
    batch = torch.zeros(3, 512).bfloat16(), torch.ones(3, 2), torch.zeros(3, 2, dtype=torch.int32)
    for name, missing in OVER.items():
        words = missing if name != "deepep_v2" else "buffer"
        with pytest.raises(ValueError, match=f"^deep_ep: {words} must be given for this format"):
            dispatch.create(name, setup, transport).dispatch(*batch)
    with pytest.raises(
        NotImplementedError, match="^deep_ep: form must be slabs, counted or expanded tokens; got slots"
    ):
        dispatch.create("flashinfer", setup, transport).dispatch(*batch)


def test_stand_in_keeps_the_library_rules(ranks):
    for name, got, want in ranks.run(1, stub_refusals)[0]:
        assert want in got, f"{name}: {got}"
