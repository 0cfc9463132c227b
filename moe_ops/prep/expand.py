"""Path E for fp32 scales: a scale that is constant over 128 x 128 blocks is repeated per block; values untouched."""

from torch import Tensor

from moe_ops.prep.converted import Converted
from moe_ops.prep.quantise import from_float
from moe_ops.prep.source import Source
from moe_ops.recipes import Recipe


def expand(source: Source, recipe: Recipe, scale_format: str) -> Converted:
    """Per-tensor scales, and block scales whose block is a multiple of 128, as one fp32 scale a block.

    Finer blocks cannot be expressed so: they are requantised with fp32 scales, and the error is measured.
    """
    scale = block_scale(source, recipe)
    if scale is None:
        return from_float(source.float(), recipe, scale_format)
    return Converted(source.values, scale, exact=True)


def block_scale(source: Source, recipe: Recipe) -> Tensor | None:
    """(N / 128, K / 128) float32, or None where the source's scale varies within a block."""
    N, K = source.shape
    rows, columns = N // recipe.w_block[0], K // recipe.w_block[1]
    if source.kind == "fp8_tensor":
        return source.factors.expand(rows, columns)
    times = [have // want for have, want in zip(source.block, recipe.w_block, strict=True)]
    whole = all(have % want == 0 for have, want in zip(source.block, recipe.w_block, strict=True))
    if source.kind != "fp8_block" or not whole:
        return None
    scale = source.factors.repeat_interleave(times[0], 0).repeat_interleave(times[1], 1)
    return scale[:rows, :columns]
