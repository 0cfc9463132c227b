"""Triton kernels of moe::quantize."""

import triton
import triton.language as tl

from moe_ops.kernels.launch import jit
from moe_ops.kernels.numeric import divided, finite_magnitude, group_scale, pack_words, to_e4m3

_TILE = 4096  # elements: 32 a thread, and at least 512 contiguous columns of 128-wide groups


# float32 (A, B, C) tiles to codes; for e2m1 two a byte along C, the even column in the low nibble.
@jit
def _encode(x, scale, byte, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr, E2M1: tl.constexpr, UE8M0: tl.constexpr):
    value = divided(x, scale, byte, UE8M0)
    if E2M1:
        size = tl.abs(value)
        # Halfway points go to the even code. Written as "not below", so that NaN counts as large.
        code = 7 - (size <= 0.25).to(tl.int32) - (size < 0.75).to(tl.int32) - (size <= 1.25).to(tl.int32)
        code -= (size < 1.75).to(tl.int32) + (size <= 2.5).to(tl.int32) + (size < 3.5).to(tl.int32)
        code -= (size <= 5.0).to(tl.int32)
        code |= (x.to(tl.int32, bitcast=True) >> 28) & 8  # the sign of x: a division may lose that of NaN
        even, odd = tl.split(tl.reshape(code, (A, B, C // 2, 2)))
        return (even | (odd << 4)).to(tl.int8)
    else:
        return to_e4m3(value)


# Quantises BLOCK_M rows of four groups. Grid (row blocks, groups / 4, batch).
@jit
def _quantize_groups_kernel(
    x_ptr, stride_xb, stride_xm, stride_xk,
    q_ptr, stride_qb, stride_qm,
    scale_ptr, stride_sb, stride_sg,
    M, G,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, E2M1: tl.constexpr, UE8M0: tl.constexpr,
):  # fmt: skip
    batch = tl.program_id(2).to(tl.int64)
    row = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    group = tl.program_id(1) * 4 + tl.arange(0, 4)
    live = (row < M)[:, None] & (group < G)[None, :]
    column = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    x_ptrs = x_ptr + batch * stride_xb + row[:, None, None] * stride_xm + column[None, :, :].to(tl.int64) * stride_xk
    x = tl.load(x_ptrs, mask=live[:, :, None], other=0.0).to(tl.float32)
    scale, byte = group_scale(tl.max(finite_magnitude(x), 2), E2M1, UE8M0)
    q = _encode(x, scale[:, :, None], byte[:, :, None], BLOCK_M, 4, GROUP, E2M1, UE8M0)
    WIDTH: tl.constexpr = GROUP // 2 if E2M1 else GROUP
    stored = group[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    tl.store(q_ptr + batch * stride_qb + row[:, None, None] * stride_qm + stored[None, :, :], q, mask=live[:, :, None])
    scale_ptr += batch * stride_sb
    if UE8M0:
        words = pack_words(tl.where(live, byte, 0))  # bytes past the last group are 0
        tl.store(scale_ptr + tl.program_id(1).to(tl.int64) * stride_sg + row, words, mask=row < M)
    else:
        tl.store(scale_ptr + group[None, :].to(tl.int64) * stride_sg + row[:, None], scale, mask=live)


# Quantises one GROUP x GROUP block, CHUNK rows at a time: once for the scale, once for the values.
# Grid (row blocks, column blocks, batch).
@jit
def _quantize_blocks_kernel(
    x_ptr, stride_xb, stride_xm, stride_xk,
    q_ptr, stride_qb, stride_qm,
    scale_ptr, stride_sb, stride_sm,
    M, K,
    GROUP: tl.constexpr, CHUNK: tl.constexpr, E2M1: tl.constexpr, UE8M0: tl.constexpr,
):  # fmt: skip
    batch = tl.program_id(2).to(tl.int64)
    top = tl.program_id(0).to(tl.int64) * GROUP
    PACK: tl.constexpr = 2 if E2M1 else 1
    column = tl.program_id(1) * GROUP + tl.arange(0, GROUP)[None, None, :]
    stored = tl.program_id(1) * (GROUP // PACK) + tl.arange(0, GROUP // PACK)[None, None, :]
    x_ptr += batch * stride_xb + column.to(tl.int64) * stride_xk
    q_ptr += batch * stride_qb + stored
    amax = tl.zeros((GROUP,), tl.float32)
    for start in range(0, GROUP, CHUNK):
        row = top + start + tl.arange(0, CHUNK)[:, None, None]
        x = tl.load(x_ptr + row * stride_xm, mask=(row < M) & (column < K), other=0.0).to(tl.float32)
        amax = tl.maximum(amax, tl.max(tl.max(finite_magnitude(x), 1), 0))
    scale, byte = group_scale(tl.max(amax, 0), E2M1, UE8M0)
    tl.store(scale_ptr + batch * stride_sb + tl.program_id(0).to(tl.int64) * stride_sm + tl.program_id(1), scale)
    for start in range(0, GROUP, CHUNK):
        row = top + start + tl.arange(0, CHUNK)[:, None, None]
        x = tl.load(x_ptr + row * stride_xm, mask=(row < M) & (column < K), other=0.0).to(tl.float32)
        q = _encode(x, scale, byte, CHUNK, 1, GROUP, E2M1, UE8M0)
        tl.store(q_ptr + row * stride_qm, q, mask=(row < M) & (stored < K // PACK))


def quantize(outputs, *, x, granularity, group, dtype, scale_format) -> None:
    """moe::quantize."""
    if x.numel() == 0:
        return
    x, q, scale = (tensor if tensor.dim() == 3 else tensor[None] for tensor in (x, *outputs))
    batch, M, K = x.shape
    flags = dict(GROUP=group, E2M1=dtype == "e2m1", UE8M0=scale_format == "ue8m0")
    tensors = (x, *x.stride(), q, q.stride(0), q.stride(1))
    if granularity == "block":
        grid = (triton.cdiv(M, group), triton.cdiv(K, group), batch)
        chunk = min(group, 2 * _TILE // group)
        _quantize_blocks_kernel[grid](*tensors, scale, scale.stride(0), scale.stride(1), M, K, CHUNK=chunk, **flags)
    else:
        rows, groups = _TILE // (4 * group), K // group
        grid = (triton.cdiv(M, rows), triton.cdiv(groups, 4), batch)
        scales = (scale, scale.stride(0), scale.stride(2))
        _quantize_groups_kernel[grid](*tensors, *scales, M, groups, BLOCK_M=rows, **flags)
