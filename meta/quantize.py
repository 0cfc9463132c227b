"""Contract of moe::quantize, and the specs of activation scales that other contracts share."""

import torch

from moe_ops import check
from moe_ops.meta.pack_scale import packed_scale_spec
from moe_ops.recipes import FLOATS, SCALE_FORMATS, Recipe
from moe_ops.rows import ceil_div
from moe_ops.spec import TensorSpec

GRANULARITIES = ("token", "block")
DTYPES = ("e4m3", "e2m1")
GROUPS = (16, 32, 64, 128, 256)


def row_scale_spec(*shape, group: int, scale_format: str) -> TensorSpec:
    """Scales of (..., M, K) values, one per row and `group` columns, in the strides a grouped GEMM reads.

    fp32: (..., M, G) float32. ue8m0: (..., M, ceil(G / 4)) int32, byte b of word c is the exponent of group 4c + b.
    Both MN-major, M padded to 16 bytes. none: an empty float32 tensor.
    """
    if scale_format == "none":
        return TensorSpec.contiguous(0, dtype=torch.float32)
    *rows, K = shape
    return packed_scale_spec(*rows, K // group, scale_format=scale_format)


def row_specs(*shape, recipe: Recipe, scale_format: str) -> tuple[TensorSpec, TensorSpec]:
    """(values, scales) of activations of this shape in this recipe."""
    values = TensorSpec.contiguous(*shape, dtype=recipe.x_dtype)
    return values, row_scale_spec(*shape, group=recipe.x_group, scale_format=scale_format)


def check_rows(op: str, x: str, values, scale, shape: tuple, letters: str, recipe: Recipe, scale_format: str) -> None:
    """Checks that (values, scale) are activations of this shape in this recipe and scale format."""
    values_spec, scale_spec = row_specs(*shape, recipe=recipe, scale_format=scale_format)
    check.shape(op, x, values, shape, letters, "Pass the result of the stage before as it is.")
    check.dtype(op, x, values, (recipe.x_dtype,), f"Recipe {recipe.name} computes in it.")
    check.layout(op, x, values, values_spec, "contiguous", "Call .contiguous() on it.")
    if not recipe.quantised:
        check.no_scale(op, f"{x}_scale", scale, recipe.name)
        return
    scale = check.given(op, f"{x}_scale", scale, f"for recipe {recipe.name}")
    check.dtype(op, f"{x}_scale", scale, (scale_spec.dtype,), f"That is scale format {scale_format}.")
    check.shape(op, f"{x}_scale", scale, scale_spec.shape, "(..., M, groups)", "Pass it beside its values.")
    check.layout(op, f"{x}_scale", scale, scale_spec, "MN-major", "Pass pack_scale's result as it is.")


def quantize(*, x, granularity, group, dtype, scale_format, backend) -> tuple[TensorSpec, TensorSpec]:
    op = "quantize"
    check.value(x.dim() in (2, 3), op, "x", "of 2 or 3 axes", lambda: tuple(x.shape), "Flatten or unsqueeze it.")
    check.dtype(op, "x", x, FLOATS, "Cast it first.")
    check.one_of(op, "granularity", granularity, GRANULARITIES)
    check.one_of(op, "dtype", dtype, DTYPES)
    check.one_of(op, "scale_format", scale_format, SCALE_FORMATS[1:])
    check.one_of(op, "group", group, GROUPS)
    *batch, M, K = x.shape
    if dtype == "e2m1":
        check.multiple(op, "the last axis of x", K, 2, "Two e2m1 values share a byte.")
        values = TensorSpec.contiguous(*batch, M, K // 2, dtype=torch.int8)
    else:
        values = TensorSpec.contiguous(*batch, M, K, dtype=torch.float8_e4m3fn)
    if granularity == "block":
        scale_shape = (*batch, ceil_div(M, group), ceil_div(K, group))
        return values, TensorSpec.contiguous(*scale_shape, dtype=torch.float32)
    check.multiple(op, "the last axis of x", K, group, "Pad it with zeros, or choose a smaller group.")
    return values, row_scale_spec(*x.shape, group=group, scale_format=scale_format)
