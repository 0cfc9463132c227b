"""moe::hc_prenorm_gemm against float64 products and sums of squares."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_ops import hc_prenorm_gemm
from moe_ops.backends import BACKENDS
from moe_ops.testing import PATTERNS, assert_bits_equal, poisoned_memory
from moe_ops.testing.operands import assert_products

SWEEP = settings.get_profile("ops")
OP = torch.ops.moe.hc_prenorm_gemm.default
SIZES = [(0, 24, 64, None), (1, 1, 64, None), (1, 24, 640, 2), (5, 24, 320, 3), (5, 7, 128, 5), (70, 130, 192, 1)]
each_size = pytest.mark.parametrize("M, N, K, splits", SIZES, ids=str)


def build(M, N, K, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(M, K, generator=generator).bfloat16(), torch.randn(N, K, generator=generator)


def lengths(K, splits):
    """Columns of each range: whole blocks of 64, one more for the first ranges until none is left over."""
    blocks = K // 64
    return [64 * (blocks // splits + (index < blocks % splits)) for index in range(splits)]


def judge(x, fn, splits, out, sqr_sum):
    if splits is None:
        out, sqr_sum = out[None], sqr_sum[None]
    end = 0
    for index, length in enumerate(lengths(x.shape[1], splits or 1)):
        columns = slice(end, end + length)
        rows, end = x[:, columns].double(), end + length
        assert_products(out[index], rows, fn[:, columns].double())
        for m, got in enumerate(sqr_sum[index].tolist()):
            assert got == pytest.approx(sum(value * value for value in rows[m].tolist()), rel=2e-6)
    assert end == x.shape[1]


@each_size
def test_hc_prenorm_gemm_meets_its_contract(M, N, K, splits, meets_contract):
    operands = build(M, N, K)
    lead, strides = ((), ()) if splits is None else ((splits,), (M * N,))
    wanted = (((*lead, M, N), torch.float32, (*strides, N, 1)),)
    wanted += (((*lead, M), torch.float32, (1,) if splits is None else (M, 1)),)
    judge(*operands, splits, *meets_contract(OP, wanted, *operands, num_splits=splits))


@pytest.mark.parametrize("splits", [None, 2])
def test_hc_prenorm_gemm_meets_its_contract_for_any_number_of_rows(splits, one_graph):
    fn = build(0, 24, 128)[1]
    inputs = [build(M, 0, 128)[0] for M in (37, 2, 3, 130)]
    one_graph(lambda x: hc_prenorm_gemm(x, fn, num_splits=splits), inputs)


@SWEEP
@given(
    M=st.integers(0, 70),
    N=st.integers(1, 80),
    blocks=st.integers(1, 12),
    splits=st.none() | st.integers(1, 14),
    seed=st.integers(0, 999),
)
def test_hc_prenorm_gemm_matches_reference_sweep(M, N, blocks, splits, seed):
    operands = build(M, N, 64 * blocks, seed)
    judge(*operands, splits, *hc_prenorm_gemm(*operands, num_splits=splits))


@each_size
def test_hc_prenorm_gemm_touches_nothing_else(M, N, K, splits, unchanged, packed_form_agrees):
    operands = build(M, N, K)
    with unchanged(*operands):
        results = hc_prenorm_gemm(*operands, num_splits=splits)
    packed_form_agrees("hc_prenorm_gemm", results, *operands, num_splits=splits)
    for pattern in PATTERNS:
        with poisoned_memory(pattern):
            for got, want in zip(hc_prenorm_gemm(*operands, num_splits=splits), results, strict=True):
                assert_bits_equal(got, want)


def test_hc_prenorm_gemm_edges_the_norm_can_follow_the_product():
    """What the op is for: RMSNorm, then a linear layer."""
    x, fn = build(9, 24, 256)
    out, sqr_sum = hc_prenorm_gemm(x, fn)
    want = torch.nn.functional.rms_norm(x.double(), (256,), eps=1e-6) @ fn.double().T
    got = out.double() * torch.rsqrt(sqr_sum[:, None].double() / 256 + 1e-6)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-4)


def test_hc_prenorm_gemm_edges_partial_sums_add_up():
    operands = build(9, 24, 640)
    for parts, whole in zip(hc_prenorm_gemm(*operands, num_splits=4), hc_prenorm_gemm(*operands), strict=True):
        torch.testing.assert_close(parts.sum(0), whole, rtol=1e-5, atol=1e-4)


def test_hc_prenorm_gemm_edges_keeps_the_mantissa_of_fn():
    """1 + 2^-20 is 1 in bf16, in tf32 and in what the Triton kernel keeps; the reference is float32."""
    x, fn = torch.zeros(1, 64).bfloat16(), torch.zeros(1, 64)
    x[0, 3], fn[0, 3] = 1.0, 1.0 + 2.0**-20
    out, sqr_sum = hc_prenorm_gemm(x, fn)
    assert out.item() == 1.0 + 2.0**-20 and sqr_sum.item() == 1.0


def test_hc_prenorm_gemm_edges_squares_are_float32():
    """A bf16 square of 1 + 2^-7 would be rounded, and 64 ones beside 2^16 would be lost."""
    x, fn = torch.ones(2, 128).bfloat16(), torch.ones(1, 128)
    x[0] = 1 + 2.0**-7
    x[1, 0] = 256
    assert hc_prenorm_gemm(x, fn)[1].tolist() == [128 * (1 + 2.0**-7) ** 2, 256.0**2 + 127]


def test_hc_prenorm_gemm_edges_a_nan_stays_in_its_row():
    x, fn = build(6, 24, 128)
    want = hc_prenorm_gemm(x, fn)
    x[2, 100] = float("nan")
    keep = torch.arange(6) != 2
    for got, whole in zip(hc_prenorm_gemm(x, fn), want, strict=True):
        assert got[2].isnan().all()
        assert_bits_equal(got[keep], whole[keep])


X, FN = build(5, 24, 128)
ROWS, WEIGHT = "Flatten it to rows, and cast it with .bfloat16().", "Pass one weight matrix, and cast it with .float()."
VALUE_ERRORS = {
    f"x must be of shape (M, K); got (1, 5, 128). {ROWS}": dict(x=X[None]),
    f"fn must be of shape (N, K); got (128,). {WEIGHT}": dict(fn=FN[0]),
    "x must be contiguous (K-major), strides (128, 1); got (1, 5). Call .contiguous() on it.": dict(
        x=X.T.contiguous().T
    ),
    "fn must be of shape (N, K) = (any, 128); got (24, 64). Both operands are contracted along K.": dict(
        fn=FN[:, :64].contiguous()
    ),
    "K must be a multiple of 64; got 80. Pad x and fn with zero columns.": dict(
        x=X[:, :80].contiguous(), fn=FN[:, :80].contiguous()
    ),
    "fn must be of at least one row and column; got (0, 128). Skip the call.": dict(fn=FN[:0]),
    "fn must be of at least one row and column; got (24, 0). Skip the call.": dict(
        x=X[:, :0].contiguous(), fn=FN[:, :0].contiguous()
    ),
    "num_splits must be None or at least 1; got 0. None returns whole sums.": dict(num_splits=0),
    "fn must be on cpu; got meta. Move it with .to('cpu').": dict(fn=FN.to("meta")),
    f"backend must be one of {', '.join(BACKENDS)}; got 'cuda'. Choose one of them.": dict(backend="cuda"),
}
TYPE_ERRORS = {
    f"x must be bfloat16; got float32. {ROWS}": dict(x=X.float()),
    f"fn must be float32; got bfloat16. {WEIGHT}": dict(fn=FN.bfloat16()),
}
REFUSED = [
    pytest.param(kind, sentence, bad, id=sentence.split(". ")[0])
    for kind, table in ((ValueError, VALUE_ERRORS), (TypeError, TYPE_ERRORS))
    for sentence, bad in table.items()
]


@pytest.mark.parametrize("kind, sentence, bad", REFUSED)
def test_hc_prenorm_gemm_explains_itself(kind, sentence, bad, says):
    with says(kind, f"hc_prenorm_gemm: {sentence}"):
        hc_prenorm_gemm(**dict(x=X, fn=FN) | bad)


@pytest.mark.parametrize("name", ["x", "fn"])
def test_hc_prenorm_gemm_explains_itself_about_gradients(name, refuses_gradients):
    refuses_gradients("hc_prenorm_gemm", hc_prenorm_gemm, dict(x=X, fn=FN), name)
