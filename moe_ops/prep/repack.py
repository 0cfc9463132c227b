"""Prepared MXFP4 weights for the sm_90 kernels of kernels/w4a8.py: codes in the order in which they expand in place.

The smaller the span of a weight's exponents, the cheaper its format: where no row spans more than SPAN powers of two
the factor of a whole row is applied once, at the end. Groups of zeros do not count.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from moe_ops import check
from moe_ops.meta.grouped_gemm import weight_scale_spec
from moe_ops.recipes import get_recipe
from moe_ops.reference.repacked import TOP_BIT, natural_weight, pairs
from moe_ops.rows import BLOCK
from moe_ops.weight_format import FORMATS, SPAN

_OP = "repack"
_REPACKED = [name for name, row in FORMATS.items() if row.repacked]


class Repacked(NamedTuple):
    """What the kernels read."""

    w: Tensor
    """(E, K / 64, N, 32) int8."""
    w_scale: Tensor
    """(E, N, K / 128) int32, MN-major."""
    weight_format: str
    """A repacked row of weight_format.FORMATS."""


def repack(w: Tensor, w_scale: Tensor, weight_format: str = "auto") -> Repacked:
    """Natural weights in a format of sm_90. Exact; exponent byte 0 (2^-127) then counts as zero in the kernels.

    Args:
        w: (E, N, K / 2) int8 of recipe mxfp4, low nibble = even column. N and K multiples of 128.
        w_scale: (E, N, K / 128) int32 UE8M0 words, MN-major.
        weight_format: a repacked row of FORMATS, or auto: sm90_row if every row's span allows, else sm90_block if
            every block's does, else sm90_group.

    Raises:
        TypeError: a dtype is another.
        ValueError: a shape, an exponent byte of 255, or a span that the format cannot hold.
    """
    check.one_of(_OP, "weight_format", weight_format, ["auto", *_REPACKED])
    E, N, K = _check(w, w_scale)
    block, row = spans(w, w_scale)
    if weight_format == "auto":
        weight_format = "sm90_row" if row <= SPAN else "sm90_block" if block <= SPAN else "sm90_group"
    factor = FORMATS[weight_format].factor
    span = {"group": 0, "block": block, "row": row}[factor]
    rule, fix = f"within {SPAN} powers of two in each {factor}", "Use weight_format='auto' or 'sm90_group'."
    check.value(span <= SPAN, _OP, "w_scale", rule, f"a span of {span}", fix)

    packed = FORMATS[weight_format].w_spec(E, N, K).empty(w.device)
    scale = _scale_spec(E, N, K).empty(w.device)
    for expert in range(E):
        codes = _codes(w[expert])
        byte = _index_bytes(codes) if factor != "group" else _shifted_bytes(codes)
        packed[expert].copy_(byte.flatten(2).transpose(0, 1).view(torch.int8))
        scale[expert].copy_(w_scale[expert] if factor == "group" else _relative(w[expert], w_scale[expert], factor))
    return Repacked(packed, scale, weight_format)


def restore(w: Tensor, w_scale: Tensor, weight_format: str) -> tuple[Tensor, Tensor]:
    """The natural (w, w_scale) of repacked ones: the same values. Codes and exponents are those that repack saw, but
    for the exponents of groups of zeros in sm90_block and sm90_row, which it did not keep."""
    check.one_of("restore", "weight_format", weight_format, _REPACKED)
    factor = FORMATS[weight_format].factor
    E, N, K = FORMATS[weight_format].sizes(w, 2)
    natural, scale = FORMATS["natural"].w_spec(E, N, K).empty(w.device), _scale_spec(E, N, K).empty(w.device)
    for expert in range(E):
        codes, words = natural_weight(w[expert], w_scale[expert], factor)
        natural[expert].copy_(codes)
        scale[expert].copy_(words)
    return natural, scale


def spans(w: Tensor, w_scale: Tensor) -> tuple[int, int]:
    """The largest span of exponents, in powers of two, within a row's 128 columns and within a row, over all experts
    of natural weights. Groups of zeros do not count."""
    block = row = 0
    for codes, scale in zip(w, w_scale, strict=True):
        exponent, used = _exponents(scale), _used(codes)
        top, bottom = exponent.where(used, -1).amax(2), exponent.where(used, 255).amin(2)
        block = max(block, int((top - bottom).max()))
        row = max(row, int((top.amax(1) - bottom.amin(1)).max()))
    return block, row


def _check(w: Tensor, w_scale: Tensor) -> tuple[int, int, int]:
    recipe = get_recipe(_OP, "mxfp4")
    fix = "Use moe_ops.prepare_weights(recipe='mxfp4')."
    check.dtype(_OP, "w", w, (recipe.w_dtype,), fix)
    check.value(w.dim() == 3, _OP, "w", "of shape (E, N, K / 2)", tuple(w.shape), fix)
    E, N, K = w.shape[0], w.shape[1], 2 * w.shape[2]
    check.multiple(_OP, "N, the rows of w,", N, BLOCK, "Pad I or K with zeros.")
    check.multiple(_OP, "K of w", K, BLOCK, "Pad K with zeros.")
    check.dtype(_OP, "w_scale", w_scale, (torch.int32,), fix)
    check.shape(_OP, "w_scale", w_scale, (E, N, K // BLOCK), "(E, N, K / 128)", fix)
    for expert, scale in enumerate(w_scale):
        wrong = _exponents(scale) == 255
        if wrong.any():
            N, block, group = (int(i) for i in wrong.nonzero()[0])
            got = f"255 in expert {expert}, row {N}, group {4 * block + group}"
            check.value(False, _OP, "w_scale", "exponent bytes from 0 to 254", got, "255 is NaN: the file is damaged.")
    return E, N, K


def _scale_spec(E: int, N: int, K: int):
    return weight_scale_spec(E, N, K, get_recipe(_OP, "mxfp4"), "ue8m0")


def _exponents(scale: Tensor) -> Tensor:
    """(N, K / 128) words -> (N, K / 128, 4) int32 bytes."""
    words = scale.clone(memory_format=torch.contiguous_format)  # an axis of size 1 keeps its stride in contiguous()
    return words.view(torch.uint8).view(*scale.shape, 4).int()


def _used(w: Tensor) -> Tensor:
    """(N, K / 2) codes -> (N, K / 128, 4) bool: whether a group holds anything but zeros."""
    return (w.view(torch.uint8).view(len(w), -1, 4, 16) & 0x77 != 0).any(-1)


def _codes(w: Tensor) -> Tensor:
    """(N, K / 2) bytes -> (N, K / 64, 2, 8, 4) codes: columns 0 to 31 and 32 to 63 of 64, in fours."""
    byte = w.view(torch.uint8)
    return torch.stack((byte & 15, byte >> 4), -1).view(len(w), -1, 2, 8, 4)


# sm90_group. A code s e e m is the e4m3 number s 0 0 e e m 0 0 times 2^6, subnormals included: the first code of a byte
# sits in bits 7 4 3 2, where e4m3 has it; the second in bits 5 6 1 0, two shifts away from there.
def _shifted_bytes(codes: Tensor) -> Tensor:
    low, high = codes.unbind(2)
    return (low & 8) << 4 | (low & 7) << 2 | (high & 8) << 2 | (high & 4) << 4 | high & 3


# sm90_block and sm90_row. The nibbles of a 32-bit word are the magnitudes of four low and four high codes, which is
# what a byte permutation takes as selectors. It leaves each nibble's top bit to a sign: of low code b in bit 8 b + 7,
# where e4m3 has it, of high code b in bit 8 b + 3.
def _index_bytes(codes: Tensor) -> Tensor:
    low, high = codes.unbind(2)
    return pairs(torch.cat((low, high), -1) & 7) | (low >> 3) << 7 | (high >> 3) << 3


def _relative(w: Tensor, scale: Tensor, factor: str) -> Tensor:
    """Scale words that count from the largest exponent of a block or of a row."""
    exponent, used = _exponents(scale), _used(w)
    top = exponent.where(used, 0).amax((1, 2) if factor == "row" else 2, keepdim=True)
    nibble = (SPAN + exponent - top).where(used, 0)
    shift = torch.arange(0, 16, 4, device=w.device)
    return (nibble << shift).sum(2, dtype=torch.int32) | top.squeeze(2) << TOP_BIT
