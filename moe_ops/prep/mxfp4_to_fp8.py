"""Path B, MXFP4 to fp8 blocks without rounding: one power of two per 128 x 128 tile.

e2m1 times 2^b is an e4m3 value for b from -8 to 6. With the tile's scale at 2^-6 of its largest group's, every group
down to 2^-14 of the largest keeps its values exactly. Groups that hold only zeros do not count.
"""

import torch
from torch import Tensor

from moe_ops.prep.converted import Converted
from moe_ops.prep.source import E4M3, MX_GROUP, Source, decode_e2m1
from moe_ops.recipes import Recipe
from moe_ops.reference.quantize import byte_value

_HEADROOM = 6
_ALWAYS_EXACT = -8
_LOWEST = -16  # there and below every e2m1 value rounds to 0
_SMALLEST, _LARGEST = 1, 254  # exponent bytes that are normal float32 numbers


def _tables() -> tuple[Tensor, Tensor]:
    """For each shift from _LOWEST to _HEADROOM and each byte of two codes: both as e4m3 (int16), and whether exact."""
    pairs = decode_e2m1(torch.arange(256, dtype=torch.uint8)[:, None]).float()
    wanted = pairs * byte_value(torch.arange(_LOWEST, _HEADROOM + 1) + 127)[:, None, None]
    codes = wanted.to(E4M3)
    return codes.view(torch.int16).flatten(), (codes.float() == wanted).all(-1).flatten()


_CODES, _EXACT = _tables()


def regroup(source: Source, recipe: Recipe, scale_format: str) -> Converted:
    """Values as e4m3 and a power of two per tile, which serves as fp32 and as ue8m0.

    `inexact_tiles` counts the tiles where a value was rounded.
    """
    block = recipe.w_block[1]
    N, K = source.shape
    byte = source.values.view(torch.uint8).view(N // block, block, K // block, block // MX_GROUP, MX_GROUP // 2)
    exponent = source.factors.int().view(byte.shape[:-1])
    used = (byte & 0x77 != 0).any(-1)

    largest = torch.where(used, exponent, -1).amax((1, 3))
    tile = torch.where(largest < 0, 127, largest - _HEADROOM).clamp(_SMALLEST, _LARGEST)  # all-zero tile: scale 1
    shift = torch.where(used, exponent - tile[:, None, :, None], 0).clamp(min=_LOWEST)
    index = ((shift - _LOWEST) * 256)[..., None] + byte
    values = _CODES.to(byte.device)[index].view(E4M3).view(N, K)
    lost = torch.zeros_like(tile, dtype=torch.bool)
    if (shift < _ALWAYS_EXACT).any():
        lost = ~_EXACT.to(byte.device)[index].all(-1).all(3).all(1)
    inexact = int(lost.sum())
    return Converted(values, byte_value(tile), exact=inexact == 0, inexact_tiles=inexact, tiles=lost.numel())
