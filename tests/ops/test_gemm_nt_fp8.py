"""moe::gemm_nt_fp8 against float64 products of decoded codes."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_ops import gemm_nt_fp8, pack_scale, quantize
from moe_ops.backends import BACKENDS
from moe_ops.recipes import RECIPES
from moe_ops.spec import TensorSpec
from moe_ops.testing import PATTERNS, assert_bits_equal, decode_rows, decode_weight, poisoned_memory, relative_error
from moe_ops.testing.operands import assert_products, codes, floats, words

SWEEP = settings.get_profile("ops")
OP = torch.ops.moe.gemm_nt_fp8.default
RECIPE = RECIPES["fp8_block"]
SIZES = [(0, 24, 256), (1, 1, 128), (1, 130, 640), (5, 200, 512), (130, 257, 384), (128, 128, 1152)]
each_format = pytest.mark.parametrize("scale_format", RECIPE.scale_formats)
each_size = pytest.mark.parametrize("M, N, K", SIZES, ids=str)


def build(scale_format, M, N, K, seed=0):
    """(x, x_scale, w, w_scale)."""
    generator, G = torch.Generator().manual_seed(seed), -(-K // 128)
    x, w = (codes(rows, K, generator=generator) for rows in (M, N))
    if scale_format == "ue8m0":
        return x, words(M, groups=G, generator=generator), w, words(N, groups=G, generator=generator)
    x_scale = floats(TensorSpec.mn_major(M, G, dtype=torch.float32), generator=generator)
    w_scale = floats(TensorSpec.contiguous(-(-N // 128), G, dtype=torch.float32), generator=generator)
    return x, x_scale, w, w_scale


def judge(operands, out):
    x, x_scale, w, w_scale = operands
    assert_products(out, decode_rows(x, x_scale, RECIPE), decode_weight(w[None], w_scale[None], RECIPE)[0])


@each_size
@each_format
def test_gemm_nt_fp8_meets_its_contract(scale_format, M, N, K, meets_contract):
    operands = build(scale_format, M, N, K)
    (out,) = meets_contract(OP, (((M, N), torch.bfloat16, (N, 1)),), *operands)
    judge(operands, out)


@each_format
def test_gemm_nt_fp8_meets_its_contract_for_any_number_of_rows(scale_format, one_graph):
    _, _, w, w_scale = build(scale_format, 1, 136, 256)
    inputs = [torch.randn(M, 256) for M in (37, 2, 3, 130)]  # the first is no other size: torch would take them for one
    one_graph(lambda x: gemm_nt_fp8(*quantize(x, scale_format=scale_format), w, w_scale), inputs)


@SWEEP
@given(
    M=st.integers(0, 140),
    N=st.integers(1, 300),
    K=st.sampled_from((128, 384, 512, 640, 2048)),
    scale_format=st.sampled_from(RECIPE.scale_formats),
    seed=st.integers(0, 999),
)
def test_gemm_nt_fp8_matches_reference_sweep(M, N, K, scale_format, seed):
    operands = build(scale_format, M, N, K, seed)
    judge(operands, gemm_nt_fp8(*operands))


@each_format
def test_gemm_nt_fp8_matches_reference_as_its_documentation_makes_operands(scale_format):
    x, w = torch.randn(20, 512), torch.randn(200, 512)
    w_q, w_scale = quantize(w, granularity="block", scale_format=scale_format)
    w_scale = pack_scale(w_scale, 200, rows_per_scale=128) if scale_format == "ue8m0" else w_scale
    operands = (*quantize(x, scale_format=scale_format), w_q, w_scale)
    out = gemm_nt_fp8(*operands)
    judge(operands, out)
    assert relative_error(out, x @ w.T) < RECIPE.max_diff


@each_size
@each_format
def test_gemm_nt_fp8_touches_nothing_else(scale_format, M, N, K, unchanged, packed_form_agrees):
    operands = build(scale_format, M, N, K)
    with unchanged(*operands):
        out = gemm_nt_fp8(*operands)
    packed_form_agrees("gemm_nt_fp8", out, *operands)
    for pattern in PATTERNS:
        with poisoned_memory(pattern):
            assert_bits_equal(gemm_nt_fp8(*operands), out)


@each_format
def test_gemm_nt_fp8_edges_a_nan_stays_in_its_row(scale_format):
    operands = build(scale_format, 6, 24, 256)
    want = gemm_nt_fp8(*operands)
    operands[0].view(torch.uint8)[2, 130] = 0x7F
    got = gemm_nt_fp8(*operands)
    assert got[2].isnan().all()
    keep = torch.arange(6) != 2
    assert_bits_equal(got[keep], want[keep])


def test_gemm_nt_fp8_edges_rounds_once():
    """256 + 1 + 1 + ...: a bf16 accumulator would stay at 256."""
    x = torch.ones(1, 128)
    x[0, 0] = 256
    ones = torch.ones(1, 1)
    out = gemm_nt_fp8(x.to(torch.float8_e4m3fn), ones, torch.ones(1, 128).to(torch.float8_e4m3fn), ones)
    assert out.item() == torch.tensor(383.0).bfloat16()


X, X_SCALE, W, W_SCALE = build("fp32", 5, 200, 256)
GOOD = dict(x=X, x_scale=X_SCALE, w=W, w_scale=W_SCALE)
UE8M0 = dict(zip(GOOD, build("ue8m0", 5, 200, 1024), strict=True))
HOW, AS_IS = "moe_ops.gemm_nt_fp8 says how to make it.", "Pass pack_scale's result as it is."
PACKER, MOVE = "Pass what its packer returned as it is.", "Move it with .to('cpu')."
NARROW = dict(x=X[:, :192].contiguous(), w=W[:, :192].contiguous())
VALUE_ERRORS = {
    f"x must be of shape (M, K); got (1, 5, 256). {HOW}": dict(x=X[None]),
    f"w must be of shape (N, K); got (1, 200, 256). {HOW}": dict(w=W[None]),
    "x must be contiguous (K-major), strides (256, 1); got (1, 5). Call .contiguous() on it.": dict(
        x=X.view(torch.uint8).T.contiguous().T.view(torch.float8_e4m3fn)
    ),
    "w must be contiguous (K-major), strides (256, 1); got (512, 1). Call .contiguous() on it.": dict(
        w=build("fp32", 5, 200, 512)[2][:, :256]
    ),
    "w must be of shape (N, K) = (any, 256); got (200, 128). Both operands are contracted along K.": dict(
        w=W[:, :128].contiguous()
    ),
    "K must be a multiple of 128; got 192. Pad x and w with zero columns before they are quantised.": NARROW,
    f"w_scale must be of shape (rows, groups) = (2, 2); got (200, 2). {HOW}": dict(w_scale=torch.ones(200, 2)),
    f"w_scale must be contiguous, strides (2, 1); got (1, 2). {PACKER}": dict(w_scale=W_SCALE.T.contiguous().T),
    f"w_scale must be of shape (rows, groups) = (200, 2); got (2, 2). {HOW}": UE8M0
    | dict(w_scale=torch.ones(2, 2, dtype=torch.int32)),
    f"w_scale must be MN-major, strides (1, 200); got (2, 1). {PACKER}": UE8M0
    | dict(w_scale=UE8M0["w_scale"].contiguous()),
    "x_scale must be of shape (..., M, groups) = (5, 2); got (5, 1). Pass it beside its values.": dict(
        x_scale=torch.ones(5, 1)
    ),
    f"x_scale must be MN-major, strides (1, 8); got (2, 1). {AS_IS}": dict(x_scale=torch.ones(5, 2)),
    f"w must be on cpu; got meta. {MOVE}": dict(w=W.to("meta")),
    f"backend must be one of {', '.join(BACKENDS)}; got 'cuda'. Choose one of them.": dict(backend="cuda"),
}
TYPE_ERRORS = {
    f"x must be float8_e4m3fn; got bfloat16. {HOW}": dict(x=X.bfloat16()),
    f"w must be float8_e4m3fn; got int8. {HOW}": dict(w=W.view(torch.int8)),
    f"w_scale must be float32 or int32; got float64. {HOW}": dict(w_scale=W_SCALE.double()),
    "x_scale must be float32; got int32. That is scale format fp32.": dict(x_scale=X_SCALE.int()),
    "x_scale must be int32; got float32. That is scale format ue8m0.": UE8M0 | dict(x_scale=torch.ones(5, 8)),
}
REFUSED = [
    pytest.param(kind, sentence, bad, id=sentence.split(". ")[0])
    for kind, table in ((ValueError, VALUE_ERRORS), (TypeError, TYPE_ERRORS))
    for sentence, bad in table.items()
]


@pytest.mark.parametrize("kind, sentence, bad", REFUSED)
def test_gemm_nt_fp8_explains_itself(kind, sentence, bad, says):
    with says(kind, f"gemm_nt_fp8: {sentence}"):
        gemm_nt_fp8(**GOOD | bad)


@pytest.mark.parametrize("name", ["x_scale", "w_scale"])
def test_gemm_nt_fp8_explains_itself_about_gradients(name, refuses_gradients):
    operands = build("fp32", 8, 24, 256)  # 8 rows: a copy of the scale keeps its strides
    refuses_gradients("gemm_nt_fp8", gemm_nt_fp8, dict(zip(GOOD, operands, strict=True)), name)
