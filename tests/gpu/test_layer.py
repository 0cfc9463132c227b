"""The whole layer on a card: against the CPU op, over poisoned memory, and replayed from a CUDA graph."""

import pytest
import torch

from moe_ops import plan
from moe_ops.prep import repack_weights
from moe_ops.rows import FUSED
from moe_ops.testing import FORMS, PATTERNS, LayerCase, assert_bits_equal, poisoned, random_routing, relative_error
from moe_ops.testing.fused_cases import FUSED_FORMS
from moe_ops.testing.kernel_check import moved

pytestmark = pytest.mark.gpu("tests/interp/test_layer.py")

LAYER = 1e-2
"""Relative error between two layers that differ in rounding: a code of GEMM2's input that flips is 6 % of its value."""
FUSED_LAYER = 2e-2
"""The same where GEMM1 ends with the activation: the reference rounds its product to bf16, so more codes flip."""
SIZES = dict(E=16, K=1024, I=512, top_k=4)


def case_of(recipe, scale_format, **more) -> LayerCase:
    return LayerCase(recipe, None if scale_format == "none" else scale_format, **(SIZES | more))


def bound(layout: str) -> float:
    """auto may take a fused layout."""
    return LAYER if layout in ("contiguous", "masked") else FUSED_LAYER


def on_card(case: LayerCase):
    """((x, topk_weights, topk_ids), keyword arguments of the op), on the card, and the reference's result."""
    inputs, weights = case.build()
    arguments = {name: moved(value, "cuda") for name, value in weights.tensors().items()}
    arguments |= dict(recipe=case.recipe, layout=case.layout, backend="triton", **case.attributes)
    return [value.cuda() for value in inputs], arguments, case.run(inputs, weights)


FORMULAS = (
    dict(swiglu_limit=1.5),
    dict(gemm1_alpha=1.702, gemm1_clamp_limit=2.0),
    dict(activation="situ", gemm1_alpha=2.0, gemm1_clamp_limit=3.0),
)
CASES = [case_of(*form, layout=layout, T=37) for form in FORMS for layout in case_of(*form).layouts]
CASES += [case_of("fp8_block", "fp32", T=T, bias=True) for T in (0, 1, 2, 128, 129, 700)]
CASES += [
    case_of(*form, T=T, layout=layout, bias=True) for form in FUSED_FORMS for T in (0, 1, 300) for layout in FUSED
]
CASES += [case_of("fp8_block", scale, T=4097, layout="gathered") for scale in ("fp32", "ue8m0")]
CASES += [case_of("fp8_block", "fp32", T=20, layout=layout, distribution="foreign") for layout in FUSED]
CASES += [case_of("mxfp4", "ue8m0", T=20, distribution=kind) for kind in ("one_expert", "foreign", "repeated")]
CASES += [case_of("bf16", "none", T=20, attributes=formula) for formula in FORMULAS]
CASES += [case_of("bf16", "none", T=5, K=1040, I=272), case_of("mxfp8", "ue8m0", T=5, K=1056, I=288)]
CASES += [case_of("fp8_block", "ue8m0", T=9, dtype=torch.float32, attributes=dict(routed_scaling_factor=2.5))]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_layer_matches_reference(case):
    inputs, arguments, want = on_card(case)
    got = torch.ops.moe.fused_deepgemm(*inputs, **arguments)
    assert relative_error(got.cpu(), want) <= bound(case.layout)


def skewed(kind: str, T: int, E: int, top_k: int) -> torch.Tensor:
    """(T, top_k) int32 ids. zipf: expert e is 1 / (e + 1) as likely. eighths: 0, 8, ... stay empty. one: all to one."""
    if kind == "one":
        return torch.full((T, top_k), -1).index_fill_(1, torch.tensor([0]), E // 2).int()
    odds = 1 / torch.arange(1.0, E + 1) if kind == "zipf" else (torch.arange(E) % 8 != 0).float()
    generator = torch.Generator().manual_seed(T)
    return torch.multinomial(odds.expand(T, E), top_k, generator=generator).int()


@pytest.mark.parametrize("kind", ["one", "zipf", "eighths"])
@pytest.mark.parametrize("T", [1, 513, 4097], ids=lambda T: f"T{T}")
@pytest.mark.parametrize("form", FORMS, ids=["-".join(form) for form in FORMS])
def test_skewed_routing(form, T, kind):
    """Every layout gives the reference's result, and the same bits again."""
    case = case_of(*form, T=T, E=32, K=512, I=256)
    (x, topk_weights, _), weights = case.build()
    ids = skewed(kind, T, case.E, case.top_k)
    want = case.run((x, topk_weights, ids), weights)
    inputs = [value.cuda() for value in (x, topk_weights, ids)]
    arguments = {name: moved(value, "cuda") for name, value in weights.tensors().items()}
    for layout in case.layouts:
        form_ = dict(recipe=case.recipe, layout=layout, backend="triton")
        got, again = (torch.ops.moe.fused_deepgemm(*inputs, **arguments, **form_) for _ in range(2))
        assert_bits_equal(again, got, f"{layout}: second run")
        error = relative_error(got.cpu(), want)
        assert error <= bound(layout), f"{layout}: {error:.1e}"


@pytest.mark.parametrize("T", [0, 1, 37, 700], ids=lambda T: f"T{T}")
def test_layer_of_repacked_weights(T):
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("the kernels of w4a8.py are for sm_90")
    case = case_of("mxfp4", "ue8m0", T=T, layout="gathered", distribution="foreign", bias=True)
    inputs, weights = case.build()
    repacked = repack_weights(weights, fp8=False)
    form = dict(recipe="mxfp4", layout="gathered", weight_format=repacked.weight_format)
    want = case.run(inputs, repacked, weight_format=repacked.weight_format)
    arguments = {name: moved(value, "cuda") for name, value in repacked.tensors().items()}
    inputs = [value.cuda() for value in inputs]
    got, again = (torch.ops.moe.fused_deepgemm(*inputs, **arguments, **form) for _ in range(2))
    assert_bits_equal(again, got, "second run")
    assert relative_error(got.cpu(), want) <= FUSED_LAYER


@pytest.mark.parametrize(
    "form, layout",
    [pytest.param(f, layout, id="-".join((*f, layout))) for f in FORMS for layout in case_of(*f).layouts],
)
def test_layer_has_the_same_bits_whatever_the_arena_held(form, layout):
    case = case_of(*form, layout=layout, T=37, distribution="foreign")
    inputs, arguments, _ = on_card(case)
    want = torch.ops.moe.fused_deepgemm(*inputs, **arguments)
    sizes = SIZES | dict(T=case.T, recipe=case.recipe, scale_format=form[1], layout=layout, backend="triton")
    for pattern in PATTERNS:
        workspace = poisoned(plan(**sizes).total_bytes, pattern, "cuda")
        assert_bits_equal(torch.ops.moe.fused_deepgemm(*inputs, workspace=workspace, **arguments), want)


@pytest.mark.unpoisoned("torch.empty must be torch's own inside a graph")
@pytest.mark.parametrize("T", [1, 37, 1100], ids=lambda T: f"T{T}")
@pytest.mark.parametrize(
    "form, layout",
    [
        pytest.param(form, layout, id="-".join((*form, layout)))
        for form in FORMS
        for layout in ("auto", *FUSED)
        if layout in case_of(*form).layouts
    ],
)
def test_layer_replays_from_a_cuda_graph(form, layout, T):
    """Other tokens and another routing, through one capture. 1100 tokens take the chunked routing."""
    case = case_of(*form, T=T, layout=layout)
    (x, topk_weights, topk_ids), arguments, _ = on_card(case)
    torch.ops.moe.fused_deepgemm(x, topk_weights, topk_ids, **arguments)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = torch.ops.moe.fused_deepgemm(x, topk_weights, topk_ids, **arguments)
    for seed, distribution in enumerate(("uniform", "one_expert", "foreign", "repeated")):
        generator = torch.Generator().manual_seed(seed)
        routing = random_routing(T, SIZES["E"], SIZES["top_k"], distribution, generator)
        for static, value in zip((x, topk_weights, topk_ids), (torch.randn(x.shape), *routing), strict=True):
            static.copy_(value)
        graph.replay()
        assert_bits_equal(out, torch.ops.moe.fused_deepgemm(x, topk_weights, topk_ids, **arguments), distribution)


@pytest.mark.unpoisoned("the fill would run on another stream")
def test_layer_runs_on_the_current_stream():
    (x, *routing), arguments, _ = on_card(case_of("fp8_block", "fp32", T=37))
    want = torch.ops.moe.fused_deepgemm(x, *routing, **arguments)
    late = torch.zeros_like(x)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)  # tens of milliseconds: a launch elsewhere would read zeros
        late.copy_(x)
        got = torch.ops.moe.fused_deepgemm(late, *routing, **arguments)
    stream.synchronize()
    assert_bits_equal(got, want)
