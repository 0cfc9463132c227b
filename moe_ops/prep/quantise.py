"""Float weights, or any others once dequantised, to a recipe: the scale is fixed first, then the values.

MX scales round up to the next power of two (ceiling rule), so nothing saturates.
"""

from torch import Tensor

from moe_ops.prep.converted import Converted
from moe_ops.prep.source import Source
from moe_ops.recipes import Recipe
from moe_ops.reference.quantize import exponent_byte, quantize_blocks, quantize_groups


def quantise(source: Source, recipe: Recipe, scale_format: str) -> Converted:
    """Rounds each value once, to the recipe's format (bf16 included)."""
    if not recipe.quantised:
        values = source.values if source.kind == "float" else source.float()
        return Converted(values.to(recipe.w_dtype), None, exact=values.dtype == recipe.w_dtype)
    return from_float(source.float(), recipe, scale_format)


def from_float(x: Tensor, recipe: Recipe, scale_format: str) -> Converted:
    """(N, K) float32 to a quantised recipe. N and K are multiples of its blocks."""
    rows, columns = recipe.w_block
    if rows > 1:
        values, scale = quantize_blocks(x, columns, scale_format)
        return Converted(values, scale, exact=False)
    values, scale = quantize_groups(x, columns, scale_format, "e2m1" if recipe.w_pack == 2 else "e4m3")
    return Converted(values, exponent_byte(scale), exact=False)
