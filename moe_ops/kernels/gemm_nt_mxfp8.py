"""Triton kernel of moe::gemm_nt_mxfp8: that of moe::gemm_nt_fp8 with block-scaled products."""

from moe_ops.kernels.gemm_nt_fp8 import multiply


def gemm_nt_mxfp8(outputs, *, x, x_scale, w, w_scale) -> None:
    (out,) = outputs
    multiply("gemm_nt_mxfp8", out, x, x_scale, w, w_scale)
