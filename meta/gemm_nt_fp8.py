"""Contract of moe::gemm_nt_fp8, and what moe::gemm_nt_mxfp8 shares with it."""

from moe_ops import check
from moe_ops.meta.gemm_nt_bf16_fp32 import check_matrix, check_same_k
from moe_ops.meta.grouped_gemm import gemm_spec, matrix_scale_spec
from moe_ops.meta.quantize import check_rows
from moe_ops.recipes import DENSE, FORMAT_OF_SCALE, RECIPES
from moe_ops.spec import TensorSpec


def quantised_nt(op: str, x, x_scale, w, w_scale) -> tuple[TensorSpec]:
    """Checks both operands, whose scales have the format of the weight's, and returns the spec of their product."""
    recipe, fix = RECIPES[DENSE[op]], f"moe_ops.{op} says how to make it."
    check_matrix(op, "x", x, recipe.x_dtype, "(M, K)", fix)
    check_matrix(op, "w", w, recipe.w_dtype, "(N, K)", fix)
    check_same_k(op, "w", w, x)
    (M, K), N = x.shape, w.shape[0]
    check.multiple(op, "K", K, recipe.granule, "Pad x and w with zero columns before they are quantised.")
    allowed = [dtype for dtype, name in FORMAT_OF_SCALE.items() if name in recipe.scale_formats]
    check.dtype(op, "w_scale", w_scale, allowed, fix)
    scale_format = FORMAT_OF_SCALE[w_scale.dtype]
    spec = matrix_scale_spec(N, K, recipe=recipe, scale_format=scale_format)
    check.shape(op, "w_scale", w_scale, spec.shape, "(rows, groups)", fix)
    kind = "contiguous" if scale_format == "fp32" else "MN-major"
    check.layout(op, "w_scale", w_scale, spec, kind, "Pass what its packer returned as it is.")
    check_rows(op, "x", x, x_scale, (M, K), "(M, K)", recipe, scale_format)
    check.same_device(op, x.device, x_scale=x_scale, w=w, w_scale=w_scale)
    return (gemm_spec(M, N=N),)


def gemm_nt_fp8(*, x, x_scale, w, w_scale, backend) -> tuple[TensorSpec]:
    return quantised_nt("gemm_nt_fp8", x, x_scale, w, w_scale)
