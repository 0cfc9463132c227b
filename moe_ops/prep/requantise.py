"""Paths C and E for ue8m0, and every other change of format: dequantise, fix new scales, round once.

The relative error that this adds is measured and reported. fp8 blocks whose scale is a power of two already stay as
they are.
"""

import torch

from moe_ops.prep.converted import Converted
from moe_ops.prep.expand import block_scale
from moe_ops.prep.quantise import from_float, quantise
from moe_ops.prep.source import Source
from moe_ops.recipes import Recipe
from moe_ops.reference.quantize import byte_value, exponent_byte


def requantise(source: Source, recipe: Recipe, scale_format: str) -> Converted:
    """Any source to any recipe through float32."""
    return quantise(source, recipe, scale_format)


def to_powers_of_two(source: Source, recipe: Recipe, scale_format: str) -> Converted:
    """fp8 to blocks with power-of-two scales: amax of the block, scale rounded up, values divided by it."""
    kept = block_scale(source, recipe)
    if kept is None:
        return from_float(source.float(), recipe, scale_format)
    same = byte_value(exponent_byte(kept)) == kept
    if same.all():
        return Converted(source.values, kept, exact=True)
    new = from_float(source.float(), recipe, scale_format)
    assert new.scale is not None
    rows, columns = recipe.w_block
    mask = same.repeat_interleave(rows, 0).repeat_interleave(columns, 1)
    values = torch.where(mask, source.values.view(torch.uint8), new.values.view(torch.uint8))
    return Converted(values.view(new.values.dtype), torch.where(same, kept, new.scale), exact=False)
