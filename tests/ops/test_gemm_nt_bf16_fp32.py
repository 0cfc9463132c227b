"""moe::gemm_nt_bf16_fp32 against float64 products."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_ops import gemm_nt_bf16_fp32
from moe_ops.backends import BACKENDS
from moe_ops.testing import PATTERNS, assert_bits_equal, poisoned_memory
from moe_ops.testing.operands import assert_products

SWEEP = settings.get_profile("ops")
OP = torch.ops.moe.gemm_nt_bf16_fp32.default
SIZES = [(0, 24, 64), (1, 1, 1), (1, 130, 640), (5, 200, 77), (130, 257, 96), (4, 0, 8), (3, 8, 0)]
each_size = pytest.mark.parametrize("M, N, K", SIZES, ids=str)


def build(M, N, K, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(rows, K, generator=generator).bfloat16() for rows in (M, N))


def judge(operands, out):
    assert_products(out, *(operand.double() for operand in operands))


@each_size
def test_gemm_nt_bf16_fp32_meets_its_contract(M, N, K, meets_contract):
    operands = build(M, N, K)
    (out,) = meets_contract(OP, (((M, N), torch.float32, (N, 1)),), *operands)
    judge(operands, out)


def test_gemm_nt_bf16_fp32_meets_its_contract_for_any_number_of_rows(one_graph):
    w = build(0, 136, 80)[1]
    one_graph(lambda x: gemm_nt_bf16_fp32(x, w), [build(M, 0, 80)[0] for M in (37, 2, 3, 130)])


@SWEEP
@given(M=st.integers(0, 140), N=st.integers(0, 300), K=st.integers(0, 900), seed=st.integers(0, 999))
def test_gemm_nt_bf16_fp32_matches_reference_sweep(M, N, K, seed):
    operands = build(M, N, K, seed)
    judge(operands, gemm_nt_bf16_fp32(*operands))


@each_size
def test_gemm_nt_bf16_fp32_touches_nothing_else(M, N, K, unchanged, packed_form_agrees):
    operands = build(M, N, K)
    with unchanged(*operands):
        out = gemm_nt_bf16_fp32(*operands)
    packed_form_agrees("gemm_nt_bf16_fp32", out, *operands)
    for pattern in PATTERNS:
        with poisoned_memory(pattern):
            assert_bits_equal(gemm_nt_bf16_fp32(*operands), out)


def test_gemm_nt_bf16_fp32_edges_rounds_nothing():
    """4096 + 1 needs 13 bits of mantissa: a bf16 result would have lost the one."""
    x = torch.tensor([[64.0, 1.0]]).bfloat16()
    assert gemm_nt_bf16_fp32(x, x).item() == 4097.0


def test_gemm_nt_bf16_fp32_edges_a_nan_stays_in_its_row():
    x, w = build(6, 24, 256)
    want = gemm_nt_bf16_fp32(x, w)
    x[2, 130] = float("nan")
    got = gemm_nt_bf16_fp32(x, w)
    assert got[2].isnan().all()
    keep = torch.arange(6) != 2
    assert_bits_equal(got[keep], want[keep])


X, W = build(5, 200, 64)
ROWS, WEIGHT = (
    "Flatten it to rows, and cast it with .bfloat16().",
    "Pass one weight matrix, and cast it with .bfloat16().",
)
CALL = "Call .contiguous() on it."
VALUE_ERRORS = {
    f"x must be of shape (M, K); got (1, 5, 64). {ROWS}": dict(x=X[None]),
    f"w must be of shape (N, K); got (64,). {WEIGHT}": dict(w=W[0]),
    f"x must be contiguous (K-major), strides (64, 1); got (1, 5). {CALL}": dict(x=X.T.contiguous().T),
    f"w must be contiguous (K-major), strides (64, 1); got (1, 200). {CALL}": dict(w=W.T.contiguous().T),
    "w must be of shape (N, K) = (any, 64); got (200, 32). Both operands are contracted along K.": dict(
        w=W[:, :32].contiguous()
    ),
    "w must be on cpu; got meta. Move it with .to('cpu').": dict(w=W.to("meta")),
    f"backend must be one of {', '.join(BACKENDS)}; got 'cuda'. Choose one of them.": dict(backend="cuda"),
}
TYPE_ERRORS = {
    f"x must be bfloat16; got float32. {ROWS}": dict(x=X.float()),
    f"w must be bfloat16; got float16. {WEIGHT}": dict(w=W.half()),
}
REFUSED = [
    pytest.param(kind, sentence, bad, id=sentence.split(". ")[0])
    for kind, table in ((ValueError, VALUE_ERRORS), (TypeError, TYPE_ERRORS))
    for sentence, bad in table.items()
]


@pytest.mark.parametrize("kind, sentence, bad", REFUSED)
def test_gemm_nt_bf16_fp32_explains_itself(kind, sentence, bad, says):
    with says(kind, f"gemm_nt_bf16_fp32: {sentence}"):
        gemm_nt_bf16_fp32(**dict(x=X, w=W) | bad)


@pytest.mark.parametrize("name", ["x", "w"])
def test_gemm_nt_bf16_fp32_explains_itself_about_gradients(name, refuses_gradients):
    refuses_gradients("gemm_nt_bf16_fp32", gemm_nt_bf16_fp32, dict(x=X, w=W), name)
