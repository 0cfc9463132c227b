"""The dense GEMMs by the deep_gemm library, and the sizes that its kernels take."""

from collections.abc import Mapping

from moe_ops.kernels import deep_gemm
from moe_ops.recipes import DENSE, RECIPES, SPLIT_BLOCK

# The copy engine wants rows at multiples of 16 bytes, in the operands and in the result: 8 columns of bf16, 4 of fp32.
# hc_prenorm_gemm's kernel asks for more.
MULTIPLES = {
    "gemm_nt_fp8": {"N": 8},
    "gemm_nt_mxfp8": {"N": 8},
    "gemm_nt_bf16_fp32": {"N": 4, "K": 8},
    "hc_prenorm_gemm": {"N": 8, "K": SPLIT_BLOCK},
}
"""Op -> what the library wants N and K to be multiples of."""

MOST_COLUMNS = {"sm90": 32, "sm100": 128}
"""arch -> the largest N of hc_prenorm_gemm."""


def why_not(op: str, arch: str, arguments: Mapping) -> str | None:
    """A sentence that says why the library's kernel does not take these sizes on this arch, or None if it does."""
    if arch == "sm120":
        return "deep_gemm is used on sm120 for grouped GEMMs only: no dense one was seen to work there."
    N, K = arguments["fn" if op == "hc_prenorm_gemm" else "w"].shape
    for name, size in {"N": N, "K": K}.items():
        multiple = MULTIPLES[op].get(name, 1)
        if size % multiple:
            return f"deep_gemm needs {name} to be a multiple of {multiple} here, and {name} is {size}."
    if op == "hc_prenorm_gemm" and N > MOST_COLUMNS[arch]:
        return f"deep_gemm takes an N of at most {MOST_COLUMNS[arch]} here on {arch}, and N is {N}."
    return None


def gemm_nt_fp8(outputs, *, x, x_scale, w, w_scale) -> None:
    """moe::gemm_nt_fp8."""
    _multiply_quantised("gemm_nt_fp8", outputs, x, x_scale, w, w_scale)


def gemm_nt_mxfp8(outputs, *, x, x_scale, w, w_scale) -> None:
    """moe::gemm_nt_mxfp8."""
    _multiply_quantised("gemm_nt_mxfp8", outputs, x, x_scale, w, w_scale)


def gemm_nt_bf16_fp32(outputs, *, x, w) -> None:
    """moe::gemm_nt_bf16_fp32."""
    (out,) = outputs
    if out.numel():
        deep_gemm.library().bf16_gemm_nt(x, w, out)


def hc_prenorm_gemm(outputs, *, x, fn, num_splits) -> None:
    """moe::hc_prenorm_gemm. The tensor cores round fn to tf32."""
    if len(x):
        deep_gemm.library().tf32_hc_prenorm_gemm(x, fn, *outputs, num_splits=num_splits)


def _multiply_quantised(op: str, outputs, x, x_scale, w, w_scale) -> None:
    """Packed scales go in as they are, so the library has nothing to cast."""
    (out,) = outputs
    if out.numel():
        left, right = (x, deep_gemm._as_stored(x_scale)), (w, deep_gemm._as_stored(w_scale))
        granularity = deep_gemm._granularity(RECIPES[DENSE[op]])
        deep_gemm.library().fp8_fp4_gemm_nt(left, right, out, **granularity)
