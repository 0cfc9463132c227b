"""Contract of moe::gemm_nt_mxfp8."""

from moe_ops.meta.gemm_nt_fp8 import quantised_nt
from moe_ops.spec import TensorSpec


def gemm_nt_mxfp8(*, x, x_scale, w, w_scale, backend) -> tuple[TensorSpec]:
    return quantised_nt("gemm_nt_mxfp8", x, x_scale, w, w_scale)
