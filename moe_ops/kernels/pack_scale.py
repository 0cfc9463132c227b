"""Triton kernel of moe::pack_scale."""

import torch
import triton
import triton.language as tl

from moe_ops.kernels.launch import jit
from moe_ops.kernels.numeric import exponent_byte, pack_words


# BLOCK_M rows times four groups of one batch entry, MN-major. Grid (row blocks, groups / 4, batch).
@jit
def _pack_scale_kernel(
    scale_ptr, stride_sb, stride_sm, stride_sg,
    out_ptr, stride_ob, stride_og,
    mn, G, rows_per_scale,
    BLOCK_M: tl.constexpr, UE8M0: tl.constexpr, BYTES: tl.constexpr,
):  # fmt: skip
    batch = tl.program_id(2).to(tl.int64)
    row = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    group = (tl.program_id(1) * 4 + tl.arange(0, 4)).to(tl.int64)
    mask = (row < mn)[:, None] & (group < G)[None, :]
    shared = (row // rows_per_scale)[:, None]
    scale_ptrs = scale_ptr + batch * stride_sb + shared * stride_sm + group[None, :] * stride_sg
    scale = tl.load(scale_ptrs, mask=mask, other=0)
    out_ptr += batch * stride_ob + row
    if UE8M0:
        byte = scale.to(tl.int32) if BYTES else exponent_byte(scale)
        words = pack_words(tl.where(mask, byte, 0))  # bytes past the last group are 0
        tl.store(out_ptr + tl.program_id(1).to(tl.int64) * stride_og, words, mask=row < mn)
    else:
        tl.store(out_ptr[:, None] + group[None, :] * stride_og, scale, mask=mask)


def pack_scale(outputs, *, scale, mn, rows_per_scale, scale_format) -> None:
    """moe::pack_scale. Scales that are no powers of two, which the reference refuses, are rounded up."""
    (out,) = outputs
    scale, out = (tensor if tensor.dim() == 3 else tensor[None] for tensor in (scale, out))
    is_bytes = scale.dtype != torch.float32
    scale = scale.view(torch.uint8) if is_bytes else scale
    batch, _, groups = scale.shape
    block = 128
    _pack_scale_kernel[(triton.cdiv(mn, block), triton.cdiv(groups, 4), batch)](
        scale, *scale.stride(), out, out.stride(0), out.stride(2), mn, groups, rows_per_scale,
        BLOCK_M=block, UE8M0=scale_format == "ue8m0", BYTES=is_bytes,
    )  # fmt: skip
