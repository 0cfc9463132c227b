"""MXFP4 weights in a repacked format (weight_format.py) read back as natural ones."""

import torch
from torch import Tensor

from moe_ops.weight_format import SPAN

TOP_BIT = 23
"""Of a scale word, and of a float32, where the exponent starts."""


def natural_weight(w: Tensor, scale: Tensor, factor: str) -> tuple[Tensor, Tensor]:
    """One expert's codes (K / 64, N, 32) and scale words (N, K / 128) -> ((N, K / 2) int8, (N, K / 128) int32)."""
    blocks, N, _ = w.shape
    byte = w.transpose(0, 1).contiguous().view(torch.uint8).view(N, blocks, 8, 4)
    codes = _from_shifted(byte) if factor == "group" else _from_indices(byte)
    natural = pairs(codes).reshape(N, 32 * blocks).view(torch.int8)
    return natural, scale if factor == "group" else _absolute(scale)


def pairs(codes: Tensor) -> Tensor:
    """(..., 4) codes -> (..., 2) bytes, the even code in the low nibble."""
    return codes[..., 0::2] | codes[..., 1::2] << 4


def _from_shifted(byte: Tensor) -> Tensor:
    low, high = byte >> 4 & 8 | byte >> 2 & 7, byte >> 2 & 8 | byte >> 4 & 4 | byte & 3
    return torch.stack((low, high), 2)


def _from_indices(byte: Tensor) -> Tensor:
    magnitude = torch.stack((byte & 7, byte >> 4 & 7), -1).flatten(-2).unflatten(-1, (2, 4))
    sign = torch.stack((byte >> 7, byte >> 3 & 1), -2) << 3
    return (magnitude | sign).transpose(2, 3)


def _absolute(scale: Tensor) -> Tensor:
    """The exponent words of a format that counts from the largest."""
    nibble = scale[..., None] >> torch.arange(0, 16, 4, device=scale.device) & 15
    exponent = (nibble - SPAN + (scale >> TOP_BIT)[..., None]).clamp(min=0)  # below 0 only where a group is all zeros
    return exponent.to(torch.uint8).view(torch.int32).squeeze(-1)
