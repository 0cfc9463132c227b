"""Contract of moe::gemm_nt_fp8, and what moe::gemm_nt_mxfp8 shares with it."""

import torch

from moe_ops import check
from moe_ops.meta.gemm_nt_bf16_fp32 import check_matrix, check_same_k
from moe_ops.meta.grouped_gemm import gemm_spec
from moe_ops.meta.pack_scale import packed_scale_spec
from moe_ops.meta.quantize import check_rows
from moe_ops.recipes import DENSE, RECIPES, Recipe
from moe_ops.rows import ceil_div
from moe_ops.spec import TensorSpec

_FORMATS = {torch.float32: "fp32", torch.int32: "ue8m0"}


def matrix_scale_spec(N, K, recipe: Recipe, scale_format: str) -> TensorSpec:
    """Scales of one (N, K) weight matrix: grouped_gemm.weight_scale_spec without its first axis.

    fp32: (ceil(N / 128), ceil(K / 128)) float32, contiguous. ue8m0: (N, ceil(K / (4 * columns))) int32, MN-major.
    """
    rows, columns = recipe.w_block
    groups = ceil_div(K, columns)
    if scale_format == "fp32":
        return TensorSpec.contiguous(ceil_div(N, rows), groups, dtype=torch.float32)
    return packed_scale_spec(N, groups, scale_format=scale_format)


def quantised_nt(op: str, x, x_scale, w, w_scale) -> tuple[TensorSpec]:
    """Checks both operands, whose scales have the format of the weight's, and returns the spec of their product."""
    recipe, fix = RECIPES[DENSE[op]], f"moe_ops.{op} says how to make it."
    check_matrix(op, "x", x, recipe.x_dtype, "(M, K)", fix)
    check_matrix(op, "w", w, recipe.w_dtype, "(N, K)", fix)
    check_same_k(op, "w", w, x)
    (M, K), N = x.shape, w.shape[0]
    check.multiple(op, "K", K, recipe.granule, "Pad x and w with zero columns before they are quantised.")
    allowed = [dtype for dtype, name in _FORMATS.items() if name in recipe.scale_formats]
    check.dtype(op, "w_scale", w_scale, allowed, fix)
    scale_format = _FORMATS[w_scale.dtype]
    spec = matrix_scale_spec(N, K, recipe, scale_format)
    check.shape(op, "w_scale", w_scale, spec.shape, "(rows, groups)", fix)
    kind = "contiguous" if scale_format == "fp32" else "MN-major"
    check.layout(op, "w_scale", w_scale, spec, kind, "Pass what its packer returned as it is.")
    check_rows(op, "x", x, x_scale, (M, K), "(M, K)", recipe, scale_format)
    check.same_device(op, x.device, x_scale=x_scale, w=w, w_scale=w_scale)
    return (gemm_spec(M, N=N),)


def gemm_nt_fp8(*, x, x_scale, w, w_scale, backend) -> tuple[TensorSpec]:
    return quantised_nt("gemm_nt_fp8", x, x_scale, w, w_scale)
