"""Triton kernels of moe::grouped_gemm_gathered and moe::grouped_gemm_direct: GEMM2 of the fused layouts."""

from dataclasses import dataclass

import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from moe_ops.kernels import pipelined, w4a8
from moe_ops.kernels.gathered_parts import kind_of, row_operand, scale_and_stride, step_scale, walk, weight_scale
from moe_ops.kernels.launch import gdc_launch_dependents, gdc_wait, jit, pdl
from moe_ops.recipes import get_recipe
from moe_ops.weight_format import FORMATS

_COLUMNS = tl.constexpr(128)


@dataclass(frozen=True)
class RowTile:
    """How a tile of so many rows is computed, by `parts` programs. group: parts walked before the next columns."""

    parts: int
    warps: int
    stages: int
    swap: bool
    group: int


_FEW = 1 << 20  # all row tiles of a column block, then the next: its weights are read once
# Rows of a tile -> how. On one H200 (torch 2.11, triton 3.6), fp8 blocks: half tiles of 64 rows beat whole ones.
ROW_TILES = {
    16: RowTile(1, 4, 3, True, _FEW),
    32: RowTile(1, 4, 3, True, _FEW),
    64: RowTile(1, 4, 3, False, 8),
    128: RowTile(2, 4, 3, False, 32),
}


# BLOCK_M rows, a part of a row tile, times 128 columns of its expert. Grid (row tiles * PARTS * column blocks,).
@jit
def _grouped_gemm_gathered_kernel(
    x_ptr, x_scale_ptr, stride_xg,
    w_desc,
    w_scale_ptr, stride_se, stride_wg,
    tiles_ptr,
    out_ptr,
    tiles,
    N: tl.constexpr, K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, PARTS: tl.constexpr, SWAP: tl.constexpr, STAGES: tl.constexpr,
    GROUP: tl.constexpr, KIND: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    BLOCKS: tl.constexpr = N // _COLUMNS
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    part, block = walk(tl.program_id(0), tiles * PARTS, BLOCKS, GROUP)
    tile = part // PARTS
    expert = tl.load(tiles_ptr + tile)
    if expert < 0:
        return
    before = part % PARTS * BLOCK_M
    slot = tl.arange(0, BLOCK_M)
    valid = tl.load(tiles_ptr + 2 * tiles + tile) - before
    if valid <= 0:
        return
    # Behind the tile's last row copies of it, which costs no mask in the loop, and which are never stored.
    row = tl.load(tiles_ptr + tiles + tile) + before + tl.minimum(slot, valid - 1)
    column = block * _COLUMNS + tl.arange(0, _COLUMNS)
    w_row = expert * N + block * _COLUMNS
    stride_xg = tl.cast(stride_xg, tl.int64)
    stride_wg = tl.cast(stride_wg, tl.int64)
    x_ptrs = x_ptr + row[:, None].to(tl.int64) * K + tl.arange(0, BLOCK_K)[None, :]
    AXIS: tl.constexpr = 0 if SWAP else 1  # the one along columns
    acc = tl.zeros((_COLUMNS, BLOCK_M) if SWAP else (BLOCK_M, _COLUMNS), tl.float32)
    if KIND == "bf16":
        for step in tl.range(0, K // BLOCK_K, num_stages=STAGES):
            x = tl.load(x_ptrs + step * BLOCK_K)
            w = w_desc.load([w_row, step * BLOCK_K])
            acc = tl.dot(w, x.T, acc) if SWAP else tl.dot(x, w.T, acc)
    else:
        PACKED: tl.constexpr = KIND == "packed"
        scale_ptr = w_scale_ptr + expert.to(tl.int64) * stride_se
        if PACKED:
            w_at, along = column, stride_wg
        else:
            w_at, along = block * (K // 128), 1
        # Scales are fetched one step ahead by hand: left to the pipeliner they arrive late.
        x_scale = step_scale(x_scale_ptr, stride_xg, row, 0, PACKED)
        w_scale = step_scale(scale_ptr, along, w_at, 0, PACKED)
        for step in tl.range(0, K // BLOCK_K, num_stages=STAGES):
            x = tl.load(x_ptrs + step * BLOCK_K)
            w = w_desc.load([w_row, step * BLOCK_K])
            ahead = tl.minimum(step + 1, K // BLOCK_K - 1)
            next_x = step_scale(x_scale_ptr, stride_xg, row, ahead, PACKED)
            next_w = step_scale(scale_ptr, along, w_at, ahead, PACKED)
            product = tl.dot(w, x.T) if SWAP else tl.dot(x, w.T)
            if PACKED:
                product *= tl.expand_dims(w_scale, 1 - AXIS)
                acc += product * tl.expand_dims(x_scale, AXIS)
            else:
                acc += product * tl.expand_dims(x_scale * w_scale, AXIS)
            x_scale = next_x
            w_scale = next_w
    out_ptrs = out_ptr + tl.expand_dims(row.to(tl.int64) * N, AXIS) + tl.expand_dims(column, 1 - AXIS)
    tl.store(out_ptrs, acc.to(tl.bfloat16), mask=tl.expand_dims(slot < valid, AXIS))


# BLOCK_N columns of one route; its row of float32 is quantised by each program. Grid (routes * column blocks,).
@jit
def _grouped_gemm_direct_kernel(
    x_ptr,
    ids_ptr, stride_it, stride_ij,
    w_ptr,
    w_scale_ptr, stride_se, stride_wg,
    out_ptr,
    E, expert_start,
    N: tl.constexpr, K: tl.constexpr, TOP_K: tl.constexpr,
    BLOCK_N: tl.constexpr, GROUPS: tl.constexpr, STAGES: tl.constexpr,
    KIND: tl.constexpr, UE8M0: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    BLOCKS: tl.constexpr = N // BLOCK_N
    route = tl.program_id(0) // BLOCKS
    block = tl.program_id(0) % BLOCKS
    token = (route // TOP_K).to(tl.int64)
    id = tl.load(ids_ptr + token * stride_it + route % TOP_K * stride_ij)
    local = id - expert_start
    here = (id >= 0) & (local >= 0) & (local < E)
    if PDL:  # before the way out: a kernel that ends counts as one that waited
        gdc_wait()
        gdc_launch_dependents()
    if not here:
        return
    expert = local.to(tl.int64)
    w_row = block * BLOCK_N + tl.arange(0, BLOCK_N)
    w_ptrs = w_ptr + expert * (N * K) + w_row[:, None] * K + tl.arange(0, 128)[None, :]
    x_ptr += route.to(tl.int64) * K
    if KIND == "bf16":
        k = tl.arange(0, 128)
        sums = tl.zeros((BLOCK_N, 128), tl.float32)
        for step in tl.range(0, tl.cdiv(K, 128), num_stages=STAGES):
            inside = step * 128 + k < K
            x = tl.load(x_ptr + step * 128 + k, mask=inside, other=0.0).to(tl.bfloat16).to(tl.float32)
            w = tl.load(w_ptrs + step * 128, mask=inside[None, :], other=0.0)
            sums += w.to(tl.float32) * x[None, :]
    else:
        q, scale = row_operand(x_ptr, 1, K, GROUPS, UE8M0)
        group = tl.arange(0, GROUPS)
        scale_ptr = w_scale_ptr + expert * stride_se
        scale_ptrs = scale_ptr + w_row // 128 * (K // 128)
        sums = tl.zeros((BLOCK_N, GROUPS), tl.float32)
        for step in tl.range(0, K // 128, num_stages=STAGES):
            w = tl.load(w_ptrs + step * 128)
            if KIND == "packed":
                w_scale = step_scale(scale_ptr, tl.cast(stride_wg, tl.int64), w_row, step, True)
            else:
                w_scale = tl.load(scale_ptrs + step)
            product = tl.dot(w, q) * (w_scale[:, None] * scale[None, :])
            sums += tl.where(group[None, :] == step, product, 0.0)  # not times 0: on a card NaN was seen there
    tl.store(out_ptr + route.to(tl.int64) * N + w_row, tl.sum(sums, 1).to(tl.bfloat16))


def grouped_gemm_gathered(outputs, *, weight_format, recipe, **arguments) -> None:
    """moe::grouped_gemm_gathered."""
    if FORMATS[weight_format].repacked:
        w4a8.grouped_gemm_gathered(outputs, weight_format=weight_format, **arguments)
    else:
        _gathered(outputs, recipe=recipe, **arguments)


def _gathered(outputs, *, x, x_scale, tiles, w, w_scale, block_m, recipe) -> None:
    (out,) = outputs
    rows, N = out.shape
    if not rows:
        return
    row = get_recipe("grouped_gemm_gathered", recipe)
    packed = row.quantised and not w_scale.is_floating_point()
    kind = kind_of(row, "ue8m0" if packed else "fp32")
    if pipelined.fits(x.device, kind, block_m):
        pipelined.grouped_gemm(out, x, x_scale, tiles, w, w_scale)
        return
    K, count, how = x.shape[1], tiles.shape[1], ROW_TILES[block_m]
    depth = 128 if row.quantised else 64
    _grouped_gemm_gathered_kernel[(count * how.parts * (N // 128),)](
        x, *scale_and_stride(x_scale, x), TensorDescriptor.from_tensor(w.view(-1, K), [128, depth]),
        *weight_scale(row, w, w_scale), tiles, out, count,
        N=N, K=K, BLOCK_M=block_m // how.parts, BLOCK_K=depth, PARTS=how.parts, SWAP=how.swap, STAGES=how.stages,
        GROUP=how.group, KIND=kind, num_warps=how.warps, **pdl(x.device),
    )  # fmt: skip


def grouped_gemm_direct(outputs, *, x, topk_ids, w, w_scale, recipe, scale_format, expert_start) -> None:
    """moe::grouped_gemm_direct."""
    (out,) = outputs
    routes, N = out.shape
    if not routes:
        return
    row = get_recipe("grouped_gemm_direct", recipe)
    K = x.shape[1]
    _grouped_gemm_direct_kernel[(routes * (N // 128),)](
        x, topk_ids, *topk_ids.stride(), w, *weight_scale(row, w, w_scale), out, len(w), expert_start,
        N=N, K=K, TOP_K=topk_ids.shape[1], BLOCK_N=128, GROUPS=max(16, triton.next_power_of_2(triton.cdiv(K, 128))),
        STAGES=6, KIND=kind_of(row, scale_format), UE8M0=scale_format == "ue8m0", num_warps=4, **pdl(x.device),
    )  # fmt: skip
