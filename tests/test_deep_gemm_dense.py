"""The dense GEMMs through deep_gemm: its stand-in's checks and numbers, what auto takes, refusals in words."""

import pytest
import torch

import moe_ops
from moe_ops import arch, backends
from moe_ops.csrc_stubs import deep_gemm as stub
from moe_ops.kernels import deep_gemm, deep_gemm_dense
from moe_ops.recipes import DENSE, RECIPES
from moe_ops.testing import assert_bits_equal, poisoned_memory, relative_error
from moe_ops.testing.dense_cases import dense_operands, hc_operands
from moe_ops.testing.kernel_check import CLOSE, CLOSE_SUMS

CUDA = torch.device("cuda")
KERNELS = {name: name for name in ("reference", "triton", "deep_gemm")}
# What deep_gemm multiplies on which generation of card (arch.READS).
ON_ARCH = [
    (9, "gemm_nt_fp8", "fp32"),
    (9, "gemm_nt_bf16_fp32", "none"),
    (10, "gemm_nt_fp8", "ue8m0"),
    (10, "gemm_nt_mxfp8", "ue8m0"),
    (10, "gemm_nt_bf16_fp32", "none"),
]
SIZES = [(0, 24, 256), (1, 8, 128), (37, 136, 640), (130, 200, 1152)]


@pytest.mark.parametrize("M, N, K", SIZES, ids=str)
@pytest.mark.parametrize("major, op, scale_format", ON_ARCH)
def test_dense_calls_pass_the_library_checks(major, op, scale_format, M, N, K):
    operands = dense_operands(op, scale_format, M, N, K)
    multiply = getattr(moe_ops, op)
    with deep_gemm.use(stub), stub.arch(major):
        got = multiply(**operands, backend="deep_gemm")
        with poisoned_memory(0x7F):
            assert_bits_equal(multiply(**operands, backend="deep_gemm").nan_to_num(), got.nan_to_num())
    want = multiply(**operands)
    assert torch.equal(got.isnan(), want.isnan())
    # the stand-in sums in float64, the reference in float32
    error = relative_error(got.nan_to_num(), want.nan_to_num())
    assert error <= (CLOSE_SUMS if got.dtype == torch.float32 else CLOSE)


@pytest.mark.parametrize("splits", [None, 1, 3, 7])
@pytest.mark.parametrize("M, N, K", [(0, 24, 64), (1, 8, 64), (37, 24, 320), (70, 32, 1088)], ids=str)
@pytest.mark.parametrize("major", [9, 10])
def test_prenorm_calls_pass_the_library_checks(major, M, N, K, splits):
    operands = hc_operands(M, N, K, splits)
    with deep_gemm.use(stub), stub.arch(major):
        results = moe_ops.hc_prenorm_gemm(**operands, backend="deep_gemm")
    for got, want in zip(results, moe_ops.hc_prenorm_gemm(**operands), strict=True):
        assert torch.equal(got.isnan(), want.isnan())
        assert relative_error(got.nan_to_num(), want.nan_to_num()) <= CLOSE_SUMS


def test_dense_calls_get_the_stride_of_a_width_one_scale():
    """A packed scale of one word a row comes back from a file or another device with the stride of that axis reset."""
    operands = dense_operands("gemm_nt_fp8", "ue8m0", 9, 24, 512)
    reset = {name: t.as_strided(t.shape, (1, 1)) if name.endswith("scale") else t for name, t in operands.items()}
    with deep_gemm.use(stub), stub.arch(10):
        want, got = (moe_ops.gemm_nt_fp8(**given, backend="deep_gemm") for given in (operands, reset))
    assert_bits_equal(got.nan_to_num(), want.nan_to_num())


def test_the_library_has_the_last_word():
    """Sizes that only the library knows of are refused by it, not by a wrong result."""
    operands = dense_operands("gemm_nt_fp8", "fp32", 5, 12, 256)
    with deep_gemm.use(stub), stub.arch(9), pytest.raises(ValueError, match="n must be a multiple of 8 on sm90"):
        moe_ops.gemm_nt_fp8(**operands, backend="deep_gemm")


def shapes(op, scale_format="none", M=64, N=24, K=256) -> dict:
    """Arguments of a dense GEMM, as far as the choice looks at them."""
    weight = torch.empty(N, K, device="meta")
    if op == "hc_prenorm_gemm":
        return dict(x=torch.empty(M, K, device="meta"), fn=weight)
    arguments = dict(x=torch.empty(M, K, device="meta"), w=weight)
    if scale_format != "none":
        dtype = {"fp32": torch.float32, "ue8m0": torch.int32}[scale_format]
        arguments["w_scale"] = torch.empty(0, dtype=dtype, device="meta")
    return arguments


@pytest.fixture
def card(monkeypatch):
    """card((9, 0)): from here on, torch sees a card of this capability, where deep_gemm and Triton work."""
    monkeypatch.setattr(deep_gemm, "probe", lambda: deep_gemm.Probe(True, "0.2.0", ""))
    monkeypatch.setattr(backends, "_check_triton", lambda op, device: None)
    return lambda capability: monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)


def test_auto_takes_deep_gemm_where_it_reads_the_form(card):
    for capability, op, scale_format, expected in (
        ((9, 0), "gemm_nt_fp8", "fp32", "deep_gemm"),
        ((9, 0), "gemm_nt_fp8", "ue8m0", "triton"),
        ((9, 0), "gemm_nt_mxfp8", "ue8m0", "triton"),
        ((9, 0), "gemm_nt_bf16_fp32", "none", "deep_gemm"),
        ((9, 0), "hc_prenorm_gemm", "none", "deep_gemm"),
        ((10, 0), "gemm_nt_fp8", "fp32", "triton"),
        ((10, 0), "gemm_nt_fp8", "ue8m0", "deep_gemm"),
        ((10, 3), "gemm_nt_mxfp8", "ue8m0", "deep_gemm"),
        ((10, 0), "gemm_nt_bf16_fp32", "none", "deep_gemm"),
        ((10, 0), "hc_prenorm_gemm", "none", "deep_gemm"),
        ((12, 0), "gemm_nt_fp8", "ue8m0", "triton"),
        ((12, 0), "hc_prenorm_gemm", "none", "triton"),
    ):
        card(capability)
        assert backends.pick(op, "auto", CUDA, KERNELS, shapes(op, scale_format)) == expected, (capability, op)
        assert backends.pick(op, "auto", torch.device("cpu"), KERNELS, shapes(op, scale_format)) == "reference"


@pytest.mark.parametrize("op", DENSE)
def test_auto_takes_triton_for_few_rows(op, card):
    card((10, 0))
    scale_format = RECIPES[DENSE[op]].scale_formats[-1]
    for M, expected in ((0, "triton"), (backends.FEW_ROWS, "triton"), (backends.FEW_ROWS + 1, "deep_gemm")):
        assert backends.pick(op, "auto", CUDA, KERNELS, shapes(op, scale_format, M=M)) == expected
    assert backends.pick(op, "deep_gemm", CUDA, KERNELS, shapes(op, scale_format, M=1)) == "deep_gemm"


SIZED = [
    ("gemm_nt_fp8", "fp32", dict(N=20), "deep_gemm needs N to be a multiple of 8 here, and N is 20."),
    ("gemm_nt_bf16_fp32", "none", dict(N=6), "deep_gemm needs N to be a multiple of 4 here, and N is 6."),
    ("gemm_nt_bf16_fp32", "none", dict(K=12), "deep_gemm needs K to be a multiple of 8 here, and K is 12."),
    ("hc_prenorm_gemm", "none", dict(N=20), "deep_gemm needs N to be a multiple of 8 here, and N is 20."),
    ("hc_prenorm_gemm", "none", dict(N=40), "deep_gemm takes an N of at most 32 here on sm90, and N is 40."),
    ("gemm_nt_mxfp8", "ue8m0", {}, "deep_gemm does not read mxfp8 with ue8m0 scales on sm90."),
]


@pytest.mark.parametrize("op, scale_format, size, reason", SIZED)
def test_deep_gemm_refused_in_words(op, scale_format, size, reason, card):
    card((9, 0))
    assert backends.pick(op, "auto", CUDA, KERNELS, shapes(op, scale_format, **size)) == "triton"
    with pytest.raises(NotImplementedError) as caught:
        backends.pick(op, "deep_gemm", CUDA, KERNELS, shapes(op, scale_format, **size))
    assert str(caught.value) == (
        f"{op}: backend must be one that runs here; got 'deep_gemm'. {reason} Pass backend='auto' for what runs here."
    )


def test_deep_gemm_refused_in_words_on_workstations(card):
    card((12, 0))
    with pytest.raises(NotImplementedError, match="deep_gemm is used on sm120 for grouped GEMMs only"):
        backends.pick("gemm_nt_fp8", "deep_gemm", CUDA, KERNELS, shapes("gemm_nt_fp8", "ue8m0"))


@pytest.mark.parametrize("major", [9, 10])
def test_the_sizes_are_those_that_the_stand_in_refuses(major):
    """The table of deep_gemm_dense against the stand-in, size by size."""
    name = f"sm{major}0"
    for op, scale_format in [form[1:] for form in ON_ARCH if form[0] == major]:
        for N, K in [(4, 128), (8, 128), (12, 256), (20, 128), (24, 256), (30, 128), (32, 136), (8, 12)]:
            if K % RECIPES[DENSE[op]].granule:
                continue
            operands = dense_operands(op, scale_format, 16, N, K)
            assert _passes(op, major, operands) == (deep_gemm_dense.why_not(op, name, operands) is None), (op, N, K)
    for N in (4, 8, 12, 32, 40, 128, 136):
        operands = hc_operands(16, N, 64, None)
        allowed = deep_gemm_dense.why_not("hc_prenorm_gemm", name, operands) is None
        assert _passes("hc_prenorm_gemm", major, operands) == allowed, N


def _passes(op: str, major: int, operands: dict) -> bool:
    with deep_gemm.use(stub), stub.arch(major):
        try:
            getattr(moe_ops, op)(**operands, backend="deep_gemm")
        except ValueError as error:
            assert "must be" in str(error)
            return False
    return True


def test_every_dense_op_has_a_backend_on_every_card():
    for name in arch.ARCHS:
        for recipe in DENSE.values():
            assert any(arch.runs(recipe, form, name) for form in RECIPES[recipe].scale_formats)
    assert set(DENSE) == set(deep_gemm_dense.MULTIPLES)
