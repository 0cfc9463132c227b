"""Mooncake's and NIXL's transports over the libraries' stand-ins: deepep_ll's contract, and what is refused."""

import pytest
import torch

from moe_ops import dispatch
from moe_ops.dispatch import FORMATS, ExpertSetup, MooncakeTransport, NixlTransport
from moe_ops.recipes import RECIPES
from moe_ops.testing import assert_bits_equal, relative_error
from moe_ops.testing.dispatch_cases import DispatchCase, run_case
from moe_ops.testing.stub_refusals import low_latency_refusals


class Bare:
    """A buffer that no call may reach."""

    rank, group_size = 0, 2


TRANSPORTS = {"mooncake": MooncakeTransport, "nixl": NixlTransport}
libraries = pytest.mark.parametrize("library", TRANSPORTS)


def case_of(library, recipe, tokens=(5, 0, 3, 1), **more):
    sizes = dict(K=512, max_tokens=8, scaling=2.0, buffer=library)
    return DispatchCase("deepep_ll", recipe, tokens, **{**sizes, **more})


def setup_of(**more):
    fields = dict(num_experts=8, top_k=2, K=512, recipe="fp8_block", scale_format="fp32", max_tokens=8)
    return ExpertSetup(**{**fields, **more})


@pytest.mark.parametrize("recipe", RECIPES)
@libraries
def test_library_equals_one_rank(ranks, library, recipe):
    packed = library == "mooncake" and RECIPES[recipe].scale_formats[0] == "ue8m0"
    case = case_of(library, recipe, payload="bf16" if packed else "auto")
    got = torch.cat(ranks.run(4, run_case, case))
    inputs, weights = case.build()
    assert relative_error(got, case.layer.judge(inputs, weights, routed_scaling_factor=2.0)) < case.layer.max_diff
    if packed or recipe == "bf16":  # elsewhere the library casts by itself
        assert_bits_equal(got, case.expected(FORMATS["deepep_ll"]), str(case))


@pytest.mark.parametrize("recipe", ["bf16", "fp8_block"])
@libraries
def test_library_sends_what_deep_ep_sends(ranks, library, recipe):
    """K with two words of scales; ids of -1 and the same expert twice among the routes."""
    for distribution in ("foreign", "one_expert"):
        case = case_of(library, recipe, distribution=distribution, K=1024)
        want = case_of("buffer", recipe, distribution=distribution, K=1024)
        assert_bits_equal(torch.cat(ranks.run(4, run_case, case)), torch.cat(ranks.run(4, run_case, want)), str(case))


def test_nixl_casts_to_packed_powers_of_two(ranks):
    case = case_of("nixl", "fp8_block", (3, 2), scale_format="ue8m0", K=1024)
    assert_bits_equal(torch.cat(ranks.run(2, run_case, case)), case.expected(FORMATS["deepep_ll"]), str(case))


@pytest.mark.parametrize(
    "wrong, words",
    [
        (dict(max_tokens=1028), "max_tokens must be at most 1024; got 1028. The low-latency kernels count no further"),
        (dict(max_tokens=3), r"ranks \* max_tokens must be a multiple of 4; got 6. Round max_tokens up"),
        (dict(scale_format="ue8m0", K=256), "K must be a multiple of 512; got 256"),
    ],
)
@libraries
def test_library_limits_are_checked_in_words(library, wrong, words):
    with pytest.raises(ValueError, match=f"^dispatch deepep_ll: {words}"):
        dispatch.create("deepep_ll", setup_of(**wrong), TRANSPORTS[library](Bare()))
    dispatch.create("deepep_ll", setup_of(max_tokens=1024), TRANSPORTS[library](Bare()))


def test_mooncake_limits_of_its_own():
    with pytest.raises(ValueError, match="payload must be bf16 beside ue8m0 scales; got auto. Mooncake's kernels cast"):
        dispatch.create("deepep_ll", setup_of(scale_format="ue8m0"), MooncakeTransport(Bare()))
    with pytest.raises(ValueError, match="top_k must be at most 32; got 33"):
        dispatch.create("deepep_ll", setup_of(num_experts=64, top_k=33), MooncakeTransport(Bare()))
    with pytest.raises(ValueError, match="^mooncake: timeout_us must be positive or -1; got 0"):
        MooncakeTransport(Bare(), timeout_us=0)


@libraries
def test_library_carries_slabs_alone(library):
    batch = torch.zeros(3, 512).bfloat16(), torch.ones(3, 2), torch.zeros(3, 2, dtype=torch.int32)
    for name, form in (("flashinfer", "slots"), ("deepep_normal", "counted tokens"), ("deepep_v2_masked", "expanded")):
        here = dispatch.create(name, setup_of(), TRANSPORTS[library](Bare()))
        with pytest.raises(NotImplementedError, match=f"^{library}: form must be slabs; got {form}"):
            here.dispatch(*batch)
    with pytest.raises(ValueError, match=f"^{library}: buffer must be given"):
        TRANSPORTS[library](None)


def test_stand_ins_keep_the_libraries_rules(ranks):
    for got, want in ranks.run(1, low_latency_refusals)[0]:
        assert want in got
