"""What the kernels of the gathered and direct layouts have in common."""

import torch
import triton.language as tl

from moe_ops.kernels.launch import jit
from moe_ops.kernels.numeric import divided, exponent_value, finite_magnitude, group_scale, to_e4m3
from moe_ops.recipes import Recipe

_COLUMNS = tl.constexpr(128)  # of a block: one group of the activation


# The row tile and the column block of an item of work: GROUP row tiles, then the next columns.
@jit
def walk(item, tiles, columns, GROUP: tl.constexpr):
    above = item // (GROUP * columns) * GROUP
    height = tl.minimum(tiles - above, GROUP)
    inside = item % (GROUP * columns)
    return above + inside % height, inside // height


# Scales of `index` rows in step `step` of 128 columns, as float32: stored so, or byte step % 4 of word step // 4.
@jit
def step_scale(scale_ptr, stride_sg, index, step, PACKED: tl.constexpr):
    if PACKED:
        word = tl.load(scale_ptr + step // 4 * stride_sg + index)
        return exponent_value((word >> (step % 4 * 8)) & 0xFF)
    else:
        return tl.load(scale_ptr + step * stride_sg + index)


# One group of the activation, quantised along AXIS, with its scale of every row stored MN-major. The program of the
# last group also zeroes the bytes behind it.
@jit
def store_group(
    act_ptr, scale_ptr, stride_sg, act, row, live, block, blocks, I,
    AXIS: tl.constexpr, QUANTISED: tl.constexpr, UE8M0: tl.constexpr,
):  # fmt: skip
    column = block * _COLUMNS + tl.arange(0, _COLUMNS)
    ptrs = act_ptr + tl.expand_dims(row.to(tl.int64) * I, AXIS) + tl.expand_dims(column, 1 - AXIS)
    mask = tl.expand_dims(live, AXIS)
    if QUANTISED:
        scale, byte = group_scale(tl.max(finite_magnitude(act), AXIS), False, UE8M0)
        q = to_e4m3(divided(act, tl.expand_dims(scale, AXIS), tl.expand_dims(byte, AXIS), UE8M0))
        tl.store(ptrs, q, mask=mask)
        if UE8M0:
            bytes_ptr = scale_ptr.to(tl.pointer_type(tl.uint8))
            word_ptrs = bytes_ptr + 4 * (block // 4 * tl.cast(stride_sg, tl.int64) + row)
            tl.store(word_ptrs + block % 4, byte.to(tl.uint8), mask=live)
            if block == blocks - 1:
                for missing in range(block + 1, tl.cdiv(blocks, 4) * 4):
                    tl.store(word_ptrs + missing % 4, tl.zeros_like(byte).to(tl.uint8), mask=live)
        else:
            tl.store(scale_ptr + block * tl.cast(stride_sg, tl.int64) + row, scale, mask=live)
    else:
        tl.store(ptrs, act.to(act_ptr.dtype.element_ty), mask=mask)


# The groups of one row of float32 as the columns of an operand, and their scales: (128, GROUPS) e4m3, (GROUPS,).
@jit
def row_operand(row_ptr, stride, size, GROUPS: tl.constexpr, UE8M0: tl.constexpr):
    group = tl.arange(0, GROUPS)
    column = group[:, None] * 128 + tl.arange(0, 128)[None, :]
    x = tl.load(row_ptr + column.to(tl.int64) * stride, mask=column < size, other=0.0).to(tl.float32)
    scale, byte = group_scale(tl.max(finite_magnitude(x), 1), False, UE8M0)
    return to_e4m3(divided(x, scale[:, None], byte[:, None], UE8M0)).T, scale


def kind_of(recipe: Recipe, scale_format: str) -> str:
    """The product these kernels form: bf16 operands, or e4m3 with fp32 or with packed UE8M0 scales of 128 columns."""
    return "bf16" if not recipe.quantised else "packed" if scale_format == "ue8m0" else "block"


def scale_and_stride(scale: torch.Tensor | None, stand_in: torch.Tensor) -> tuple:
    """(scales, stride of their groups); a pointer for what is never read where there are none."""
    return (stand_in, 0) if scale is None or not scale.numel() else (scale, scale.stride(-1))


def weight_scale(recipe: Recipe, w: torch.Tensor, scale: torch.Tensor | None) -> tuple:
    """(scales, stride of experts, stride of groups)."""
    return (w, 0, 0) if not recipe.quantised else (scale, scale.stride(0), scale.stride(2))
