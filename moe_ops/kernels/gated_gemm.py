"""Triton kernels of moe::gated_gemm_gathered and moe::gated_gemm_direct: GEMM1 that ends with the activation.

A program computes 128 gate columns and their 128 up columns, which is one group of the quantised activation, so the
gate, the product and the quantisation happen in registers and 4 I bytes a row never go to memory.

- gathered: the rows of a tile are read from the tokens by their number. With few rows an expert the operands are
  swapped: 128 weight rows take the tensor core's long side, 16 or 32 tokens the other. Two or three stages, so that
  two programs share a multiprocessor: measured better than deeper pipelines.
- direct: one route a program. The groups of its token are the columns of one constant right operand; step k adds
  column k alone, so the loop loads nothing but weights.
"""

from dataclasses import dataclass

import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from moe_ops.arch import arch_of
from moe_ops.kernels import pipelined, w4a8
from moe_ops.kernels.gathered_parts import (
    kind_of,
    row_operand,
    scale_and_stride,
    step_scale,
    store_group,
    walk,
    weight_scale,
)
from moe_ops.kernels.launch import gdc_launch_dependents, gdc_wait, given, jit, pdl
from moe_ops.kernels.silu_and_quant import formula_of, gated
from moe_ops.recipes import get_recipe
from moe_ops.weight_format import FORMATS

_COLUMNS = tl.constexpr(128)  # gate columns of a program: one group of the activation


@dataclass(frozen=True)
class GatedTile:
    """How a tile of so many rows is computed, by `parts` programs. group: parts walked before the next columns."""

    warps: int
    stages: int
    swap: bool
    group: int
    parts: int = 1


_FEW = 1 << 20  # all row tiles of a column block, then the next: its weights are read once
_HALVES = GatedTile(8, 3, False, 16, parts=2)
# arch -> kind -> rows of a tile -> how. sm90's from one H200 (torch 2.11, triton 3.6); sm100's compile without spills.
GATED_TILES: dict[str, dict[str, dict[int, GatedTile]]] = {
    "sm90": {
        "block": {
            16: GatedTile(8, 3, True, _FEW),
            32: GatedTile(4, 3, True, _FEW),
            64: GatedTile(8, 3, False, 8),
            128: _HALVES,  # Hopper itself: pipelined.py
        },
        "packed": {
            16: GatedTile(8, 3, True, _FEW),
            32: GatedTile(8, 3, True, _FEW),
            64: GatedTile(8, 3, False, 8),
            128: _HALVES,
        },
        "bf16": {
            16: GatedTile(4, 4, True, _FEW),
            32: GatedTile(8, 3, True, _FEW),
            64: GatedTile(8, 3, False, 8),
            128: GatedTile(8, 3, False, 16),
        },
    },
    "sm100": {
        "block": {
            16: GatedTile(8, 3, True, _FEW),
            32: GatedTile(8, 3, True, _FEW),
            64: GatedTile(8, 3, False, 8),
            128: _HALVES,
        },
        "packed": {
            16: GatedTile(8, 3, True, _FEW),
            32: GatedTile(8, 3, True, _FEW),
            64: GatedTile(8, 3, True, 16, parts=2),
            128: GatedTile(8, 3, True, 32, parts=4),
        },
    },
}
GATED_TILES["sm100"]["bf16"] = GATED_TILES["sm90"]["bf16"] | {128: _HALVES}  # situ has no registers for whole tiles
# Less shared memory: three stages.
GATED_TILES["sm120"] = GATED_TILES["sm90"] | {"bf16": GATED_TILES["sm90"]["bf16"] | {16: GatedTile(8, 3, True, _FEW)}}


def gated_tile(arch: str, kind: str, block_m: int) -> GatedTile:
    """The table's; the interpreter runs Hopper's."""
    return GATED_TILES["sm90" if arch == "cpu" else arch][kind][block_m]


# BLOCK_M rows, a part of a row tile, times 128 gate and 128 up columns of its expert.
# Grid (row tiles * PARTS * column blocks,).
@jit
def _gated_gemm_gathered_kernel(
    x_ptr, x_scale_ptr, stride_xg,
    w_desc,
    w_scale_ptr, stride_se, stride_wg,
    row_token_ptr, tiles_ptr,
    bias_ptr, stride_be, stride_bn,
    act_ptr, act_scale_ptr, stride_ag,
    tiles, alpha, limit,
    K: tl.constexpr, I: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, PARTS: tl.constexpr, SWAP: tl.constexpr, STAGES: tl.constexpr,
    GROUP: tl.constexpr, KIND: tl.constexpr, FORM: tl.constexpr, HAS_LIMIT: tl.constexpr, QUANTISED: tl.constexpr,
    UE8M0: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    BLOCKS: tl.constexpr = I // _COLUMNS
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    part, block = walk(tl.program_id(0), tiles * PARTS, BLOCKS, GROUP)
    tile = part // PARTS
    expert = tl.load(tiles_ptr + tile)
    if expert < 0:
        return
    before = part % PARTS * BLOCK_M
    valid = tl.load(tiles_ptr + 2 * tiles + tile) - before
    if valid <= 0:
        return
    slot = tl.arange(0, BLOCK_M)
    live = slot < valid
    # Behind the last row copies of it: one token for all would be read by every multiprocessor at once.
    row = tl.load(tiles_ptr + tiles + tile) + before + tl.minimum(slot, valid - 1)
    token = tl.load(row_token_ptr + row)
    column = block * _COLUMNS + tl.arange(0, _COLUMNS)
    gate_row = expert * 2 * I + block * _COLUMNS
    stride_xg = tl.cast(stride_xg, tl.int64)
    stride_wg = tl.cast(stride_wg, tl.int64)
    x_ptrs = x_ptr + token[:, None].to(tl.int64) * K + tl.arange(0, BLOCK_K)[None, :]
    AXIS: tl.constexpr = 0 if SWAP else 1  # the one along columns
    gate = tl.zeros((_COLUMNS, BLOCK_M) if SWAP else (BLOCK_M, _COLUMNS), tl.float32)
    up = tl.zeros((_COLUMNS, BLOCK_M) if SWAP else (BLOCK_M, _COLUMNS), tl.float32)
    if KIND == "bf16":
        for step in tl.range(0, K // BLOCK_K, num_stages=STAGES):
            x = tl.load(x_ptrs + step * BLOCK_K)
            w_gate = w_desc.load([gate_row, step * BLOCK_K])
            w_up = w_desc.load([gate_row + I, step * BLOCK_K])
            gate = tl.dot(w_gate, x.T, gate) if SWAP else tl.dot(x, w_gate.T, gate)
            up = tl.dot(w_up, x.T, up) if SWAP else tl.dot(x, w_up.T, up)
    else:
        PACKED: tl.constexpr = KIND == "packed"
        scale_ptr = w_scale_ptr + expert.to(tl.int64) * stride_se
        if PACKED:  # a scale for every weight row, words along K
            gate_at, up_at, along = column, column + I, stride_wg
        else:  # one for 128 x 128, rows of K / 128
            gate_at, up_at, along = block * (K // 128), (block + BLOCKS) * (K // 128), 1
        # Scales are fetched one step ahead by hand: left to the pipeliner they arrive late.
        x_scale = step_scale(x_scale_ptr, stride_xg, token, 0, PACKED)
        gate_scale = step_scale(scale_ptr, along, gate_at, 0, PACKED)
        up_scale = step_scale(scale_ptr, along, up_at, 0, PACKED)
        for step in tl.range(0, K // BLOCK_K, num_stages=STAGES):
            x = tl.load(x_ptrs + step * BLOCK_K)
            w_gate = w_desc.load([gate_row, step * BLOCK_K])
            w_up = w_desc.load([gate_row + I, step * BLOCK_K])
            ahead = tl.minimum(step + 1, K // BLOCK_K - 1)
            next_x = step_scale(x_scale_ptr, stride_xg, token, ahead, PACKED)
            next_gate = step_scale(scale_ptr, along, gate_at, ahead, PACKED)
            next_up = step_scale(scale_ptr, along, up_at, ahead, PACKED)
            gate_product = tl.dot(w_gate, x.T) if SWAP else tl.dot(x, w_gate.T)
            up_product = tl.dot(w_up, x.T) if SWAP else tl.dot(x, w_up.T)
            if PACKED:
                gate_product *= tl.expand_dims(gate_scale, 1 - AXIS)
                up_product *= tl.expand_dims(up_scale, 1 - AXIS)
                gate += gate_product * tl.expand_dims(x_scale, AXIS)
                up += up_product * tl.expand_dims(x_scale, AXIS)
            else:
                gate += gate_product * tl.expand_dims(x_scale * gate_scale, AXIS)
                up += up_product * tl.expand_dims(x_scale * up_scale, AXIS)
            x_scale = next_x
            gate_scale = next_gate
            up_scale = next_up
    if bias_ptr is not None:
        bias_ptrs = bias_ptr + expert.to(tl.int64) * stride_be + column * stride_bn
        gate += tl.expand_dims(tl.load(bias_ptrs).to(tl.float32), 1 - AXIS)
        up += tl.expand_dims(tl.load(bias_ptrs + I * stride_bn).to(tl.float32), 1 - AXIS)
    act = gated(gate, up, alpha, limit, FORM, HAS_LIMIT)
    store_group(
        act_ptr, act_scale_ptr, stride_ag, act, row, live, block, BLOCKS, I, AXIS, QUANTISED, UE8M0,
    )  # fmt: skip


# BLOCK_N gate columns and their up columns of one route; float32. Grid (routes * column blocks,).
@jit
def _gated_gemm_direct_kernel(
    x_ptr, stride_xt, stride_xk,
    ids_ptr, stride_it, stride_ij,
    w_ptr,
    w_scale_ptr, stride_se, stride_wg,
    bias_ptr, stride_be, stride_bn,
    act_ptr, src2dst_ptr,
    E, expert_start, alpha, limit,
    K: tl.constexpr, I: tl.constexpr, TOP_K: tl.constexpr,
    BLOCK_N: tl.constexpr, GROUPS: tl.constexpr, STAGES: tl.constexpr,
    KIND: tl.constexpr, FORM: tl.constexpr, HAS_LIMIT: tl.constexpr, UE8M0: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    BLOCKS: tl.constexpr = I // BLOCK_N
    if PDL:
        gdc_launch_dependents()
    route = tl.program_id(0) // BLOCKS
    block = tl.program_id(0) % BLOCKS
    token = (route // TOP_K).to(tl.int64)
    id = tl.load(ids_ptr + token * stride_it + route % TOP_K * stride_ij)
    local = id - expert_start
    here = (id >= 0) & (local >= 0) & (local < E)
    if block == 0:
        tl.store(src2dst_ptr + route, tl.where(here, route, -1))
    if not here:
        return
    expert = local.to(tl.int64)
    lane = tl.arange(0, 2 * BLOCK_N)
    # BLOCK_N gate rows, then their up rows, as one operand.
    # Distances from the first one are constants to the compiler, which saves registers.
    distance = tl.where(lane < BLOCK_N, lane, I + lane - BLOCK_N)
    w_row = block * BLOCK_N + distance
    w_ptr += (expert * (2 * I) + block * BLOCK_N) * K
    w_ptrs = w_ptr + (distance[:, None] * K + tl.arange(0, 128)[None, :])
    x_ptr += token * stride_xt
    if KIND == "bf16":
        k = tl.arange(0, 128)
        sums = tl.zeros((2 * BLOCK_N, 128), tl.float32)
        for step in tl.range(0, tl.cdiv(K, 128), num_stages=STAGES):
            inside = step * 128 + k < K
            x = tl.load(x_ptr + (step * 128 + k) * stride_xk, mask=inside, other=0.0).to(tl.bfloat16).to(tl.float32)
            w = tl.load(w_ptrs + step * 128, mask=inside[None, :], other=0.0)
            sums += w.to(tl.float32) * x[None, :]
    else:
        q, scale = row_operand(x_ptr, stride_xk, K, GROUPS, UE8M0)
        group = tl.arange(0, GROUPS)
        scale_ptr = w_scale_ptr + expert * stride_se
        scale_ptrs = scale_ptr + w_row // 128 * (K // 128)
        sums = tl.zeros((2 * BLOCK_N, GROUPS), tl.float32)
        for step in tl.range(0, K // 128, num_stages=STAGES):
            w = tl.load(w_ptrs + step * 128)
            if KIND == "packed":
                w_scale = step_scale(scale_ptr, tl.cast(stride_wg, tl.int64), w_row, step, True)
            else:
                w_scale = tl.load(scale_ptrs + step)
            product = tl.dot(w, q) * (w_scale[:, None] * scale[None, :])
            sums += tl.where(group[None, :] == step, product, 0.0)  # not times 0: on a card NaN was seen there
    gate, up = tl.sum(sums, 1).reshape(2, BLOCK_N).permute(1, 0).split()
    column = block * BLOCK_N + tl.arange(0, BLOCK_N)
    if bias_ptr is not None:
        bias_ptrs = bias_ptr + expert * stride_be + column * stride_bn
        gate += tl.load(bias_ptrs).to(tl.float32)
        up += tl.load(bias_ptrs + I * stride_bn).to(tl.float32)
    act = gated(gate, up, alpha, limit, FORM, HAS_LIMIT)
    tl.store(act_ptr + route.to(tl.int64) * I + column, act)


def gated_gemm_gathered(outputs, *, weight_format, **arguments) -> None:
    """moe::gated_gemm_gathered."""
    if FORMATS[weight_format].repacked:
        w4a8.gated_gemm_gathered(outputs, weight_format=weight_format, **arguments)
    else:
        _gathered(outputs, **arguments)


def _gathered(
    outputs, *, x, x_scale, row_token, tiles, w, w_scale, block_m, bias, recipe, scale_format, **attributes
) -> None:
    act, act_scale = outputs
    if not len(act):
        return
    row = get_recipe("gated_gemm_gathered", recipe)
    kind = kind_of(row, scale_format)
    K, I = x.shape[1], act.shape[1]
    depth = 128 if row.quantised else 64
    formula, flags = formula_of("gated_gemm_gathered", recipe=recipe, scale_format=scale_format, **attributes)
    if pipelined.fits(x.device, kind, block_m):
        pipelined.gated_gemm(act, act_scale, x, x_scale, row_token, tiles, w, w_scale, given(bias), formula, flags)
        return
    how = gated_tile(arch_of("gated_gemm_gathered", x.device), kind, block_m)
    count = tiles.shape[1]
    _gated_gemm_gathered_kernel[(count * how.parts * (I // 128),)](
        x, *scale_and_stride(x_scale, x), TensorDescriptor.from_tensor(w.view(-1, K), [128, depth]),
        *weight_scale(row, w, w_scale), row_token, tiles, *given(bias), act, *scale_and_stride(act_scale, act),
        count, *formula, K=K, I=I, BLOCK_M=block_m // how.parts, BLOCK_K=depth, PARTS=how.parts, SWAP=how.swap,
        STAGES=how.stages, GROUP=how.group, KIND=kind, **flags, num_warps=how.warps, **pdl(x.device),
    )  # fmt: skip


def gated_gemm_direct(
    outputs, *, hidden_states, topk_ids, w, w_scale, bias, recipe, scale_format, expert_start, **attributes
) -> None:
    """moe::gated_gemm_direct. The first kernel of its layer: it must not start before its inputs are written."""
    act, src2dst = outputs
    routes, I = act.shape
    if not routes:
        return
    row = get_recipe("gated_gemm_direct", recipe)
    K = hidden_states.shape[1]
    block = 32 if K <= 2048 or I % 64 else 64
    formula, flags = formula_of("gated_gemm_direct", recipe=recipe, scale_format=scale_format, **attributes)
    flags.pop("QUANTISED")
    constants = pdl(hidden_states.device)
    constants.pop("launch_pdl", None)
    _gated_gemm_direct_kernel[(routes * (I // block),)](
        hidden_states, *hidden_states.stride(), topk_ids, *topk_ids.stride(), w, *weight_scale(row, w, w_scale),
        *given(bias), act, src2dst, len(w), expert_start, *formula,
        K=K, I=I, TOP_K=topk_ids.shape[1], BLOCK_N=block, GROUPS=max(16, triton.next_power_of_2(triton.cdiv(K, 128))),
        STAGES=4, KIND=kind_of(row, scale_format), **flags, num_warps=4, **constants,
    )  # fmt: skip
