"""Reference of moe::gemm_nt_mxfp8."""

from moe_ops.reference.gemm_nt_fp8 import multiply


def gemm_nt_mxfp8(outputs, *, x, x_scale, w, w_scale) -> None:
    (out,) = outputs
    multiply("gemm_nt_mxfp8", out, x, x_scale, w, w_scale)
