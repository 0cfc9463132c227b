"""moe::gemm_nt_mxfp8 against float64 products of decoded codes."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_ops import gemm_nt_mxfp8, quantize
from moe_ops.recipes import RECIPES
from moe_ops.spec import TensorSpec
from moe_ops.testing import PATTERNS, assert_bits_equal, decode_rows, decode_weight, poisoned_memory, relative_error
from moe_ops.testing.operands import assert_products, codes, words

SWEEP = settings.get_profile("ops")
OP = torch.ops.moe.gemm_nt_mxfp8.default
RECIPE = RECIPES["mxfp8"]
# One word a row, several, and words with bytes that belong to no group.
SIZES = [(0, 24, 128), (1, 1, 32), (1, 130, 640), (5, 200, 96), (130, 257, 288), (128, 128, 1152)]
each_size = pytest.mark.parametrize("M, N, K", SIZES, ids=str)


def build(M, N, K, seed=0):
    """(x, x_scale, w, w_scale)."""
    generator = torch.Generator().manual_seed(seed)
    x, w = (codes(rows, K, generator=generator) for rows in (M, N))
    x_scale, w_scale = (words(rows, groups=K // 32, generator=generator) for rows in (M, N))
    return x, x_scale, w, w_scale


def judge(operands, out):
    x, x_scale, w, w_scale = operands
    assert_products(out, decode_rows(x, x_scale, RECIPE), decode_weight(w[None], w_scale[None], RECIPE)[0])


@each_size
def test_gemm_nt_mxfp8_meets_its_contract(M, N, K, meets_contract):
    operands = build(M, N, K)
    (out,) = meets_contract(OP, (((M, N), torch.bfloat16, (N, 1)),), *operands)
    judge(operands, out)


def test_gemm_nt_mxfp8_meets_its_contract_for_any_number_of_rows(one_graph):
    _, _, w, w_scale = build(1, 136, 256)
    inputs = [torch.randn(M, 256) for M in (37, 2, 3, 130)]  # the first is no other size: torch would take them for one
    one_graph(lambda x: gemm_nt_mxfp8(*quantize(x, group=32, scale_format="ue8m0"), w, w_scale), inputs)


@SWEEP
@given(M=st.integers(0, 140), N=st.integers(1, 300), K=st.integers(1, 40), seed=st.integers(0, 999))
def test_gemm_nt_mxfp8_matches_reference_sweep(M, N, K, seed):
    operands = build(M, N, 32 * K, seed)
    judge(operands, gemm_nt_mxfp8(*operands))


def test_gemm_nt_mxfp8_matches_reference_as_its_documentation_makes_operands():
    x, w = torch.randn(20, 416), torch.randn(200, 416)
    form = dict(group=32, scale_format="ue8m0")
    operands = (*quantize(x, **form), *quantize(w, **form))
    out = gemm_nt_mxfp8(*operands)
    judge(operands, out)
    assert relative_error(out, x @ w.T) < RECIPE.max_diff


@each_size
def test_gemm_nt_mxfp8_touches_nothing_else(M, N, K, unchanged, packed_form_agrees):
    operands = build(M, N, K)
    with unchanged(*operands):
        out = gemm_nt_mxfp8(*operands)
    packed_form_agrees("gemm_nt_mxfp8", out, *operands)
    for pattern in PATTERNS:
        with poisoned_memory(pattern):
            assert_bits_equal(gemm_nt_mxfp8(*operands), out)


def test_gemm_nt_mxfp8_edges_every_byte_scales_its_own_columns():
    """A one in each group of 32 columns, scaled by another power of two: nothing is shared or swapped."""
    x = torch.zeros(8, 256)
    x[torch.arange(8), 32 * torch.arange(8) + 5] = 1
    x_scale = TensorSpec.mn_major(8, 2, dtype=torch.int32).empty("cpu")
    x_scale.copy_(torch.tensor([0x82818080, 0x86858483]).int())  # exponents 1 1 2 3, 4 5 6 7
    w = torch.ones(1, 256).to(torch.float8_e4m3fn)
    w_scale = TensorSpec.mn_major(1, 2, dtype=torch.int32).empty("cpu").fill_(0x7F7F7F7F)
    out = gemm_nt_mxfp8(x.to(torch.float8_e4m3fn), x_scale, w, w_scale)
    assert out.flatten().tolist() == [2, 2, 4, 8, 16, 32, 64, 128]


def test_gemm_nt_mxfp8_edges_a_nan_stays_in_its_row():
    operands = build(6, 24, 256)
    want = gemm_nt_mxfp8(*operands)
    operands[1][2, 1] = -1  # byte 255 is NaN
    got = gemm_nt_mxfp8(*operands)
    assert got[2].isnan().all()
    keep = torch.arange(6) != 2
    assert_bits_equal(got[keep], want[keep])


GOOD = dict(zip(("x", "x_scale", "w", "w_scale"), build(5, 200, 1024), strict=True))
HOW = "moe_ops.gemm_nt_mxfp8 says how to make it."
NARROW = {name: GOOD[name][:, :48].contiguous() for name in ("x", "w")}
VALUE_ERRORS = {
    f"x must be of shape (M, K); got (1, 5, 1024). {HOW}": dict(x=GOOD["x"][None]),
    f"w must be of shape (N, K); got (1, 200, 1024). {HOW}": dict(w=GOOD["w"][None]),
    "K must be a multiple of 32; got 48. Pad x and w with zero columns before they are quantised.": NARROW,
    f"w_scale must be of shape (rows, groups) = (200, 8); got (200, 7). {HOW}": dict(w_scale=GOOD["w_scale"][:, :7]),
    "w_scale must be MN-major, strides (1, 200); got (8, 1). Pass what its packer returned as it is.": dict(
        w_scale=GOOD["w_scale"].contiguous()
    ),
    "x_scale must be MN-major, strides (1, 8); got (1, 5). Pass pack_scale's result as it is.": dict(
        x_scale=GOOD["x_scale"].T.contiguous().T
    ),
    "x_scale must be on cpu; got meta. Move it with .to('cpu').": dict(
        x_scale=TensorSpec.mn_major(5, 8, dtype=torch.int32).empty("meta")
    ),
}
TYPE_ERRORS = {
    f"w must be float8_e4m3fn; got int8. {HOW}": dict(w=GOOD["w"].view(torch.int8)),
    f"w_scale must be int32; got float32. {HOW}": dict(w_scale=torch.ones(200, 32)),
    "x_scale must be int32; got float32. That is scale format ue8m0.": dict(x_scale=torch.ones(5, 32)),
}
REFUSED = [
    pytest.param(kind, sentence, bad, id=sentence.split(". ")[0])
    for kind, table in ((ValueError, VALUE_ERRORS), (TypeError, TYPE_ERRORS))
    for sentence, bad in table.items()
]


@pytest.mark.parametrize("kind, sentence, bad", REFUSED)
def test_gemm_nt_mxfp8_explains_itself(kind, sentence, bad, says):
    with says(kind, f"gemm_nt_mxfp8: {sentence}"):
        gemm_nt_mxfp8(**GOOD | bad)
