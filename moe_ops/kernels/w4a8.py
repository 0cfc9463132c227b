"""Triton kernels of both grouped GEMMs of the gathered layout for Hopper: MXFP4 weights, e4m3 activations.

Weight rows are the left operand of fp8 wgmma, which takes it from registers, and tokens are its columns. Codes expand
on the way from shared memory to the tensor core, 128 columns of K a step: four products of 32 columns. How the scale of
a group meets its product is the weight's format (weight_format.py).
"""

from dataclasses import dataclass, replace

import torch
import triton.language as tl

from moe_ops.kernels import launch
from moe_ops.kernels.expand_e2m1 import INDEXED_UNIT, SHIFTED_UNIT, expand_indexed, expand_shifted, power
from moe_ops.kernels.gathered_parts import step_scale, store_group
from moe_ops.kernels.launch import gdc_launch_dependents, gdc_wait, given, jit
from moe_ops.kernels.silu_and_quant import formula_of, gated
from moe_ops.rows import BLOCK
from moe_ops.weight_format import FORMATS

_BLOCK = tl.constexpr(BLOCK)


@dataclass(frozen=True)
class Tile:
    """How one program computes a token tile times 128 rows of a weight. GEMM1: of its gate and of its up rows."""

    warps: int
    stages: int
    parts: int = 1
    """Programs that share the rows of a token tile."""
    narrow: bool = False
    """Tiles with at most 16 tokens take products of 16 in a branch of their own."""
    resident: int = 0
    """Programs for which the registers of a multiprocessor are to suffice; 0: the compiler's choice."""


# (a factor for each group, rows of a token tile) -> tile. More warps cost more than they hide, until registers run
# out. 16 and 32 rows by row or block: the best of a few on one H200 (torch 2.11, triton 3.6, 2026-12-01, narrow
# 2026-12-03); the others compile without spills.
_GATED = {
    (False, 16): Tile(4, 3, resident=3),
    (False, 32): Tile(4, 4, narrow=True),
    (False, 64): Tile(8, 3),
    (True, 16): Tile(4, 3, resident=3),
    (True, 32): Tile(8, 3),
    (True, 64): Tile(8, 3, parts=2),
    (False, 128): Tile(8, 3, parts=2),
    (True, 128): Tile(8, 3, parts=4),
}
_DOWN = {
    (False, 16): Tile(4, 3, resident=4),
    (False, 32): Tile(4, 4, narrow=True),
    (False, 64): Tile(4, 3),
    (True, 16): Tile(4, 3, resident=4),
    (True, 32): Tile(4, 3),
    (True, 64): Tile(8, 3),
    (False, 128): Tile(4, 3, parts=2),
    (True, 128): Tile(8, 3, parts=2),
}

_MULTIPROCESSORS = 132  # of an H100 or H200
_REGISTERS = 65536  # of a multiprocessor; they are given to threads in eights
_DEEP = 8  # stages where so few programs run that each must keep more bytes in flight


def choose_tile(gated: bool, weight_format: str, block_m: int, blocks: int) -> Tile:
    """The tile for token tiles of block_m rows. blocks: of 128 weight rows times a token tile, in the whole GEMM."""
    tile = (_GATED if gated else _DOWN)[FORMATS[weight_format].factor == "group", block_m]
    return replace(tile, stages=_DEEP, resident=0) if blocks <= 2 * _MULTIPROCESSORS else tile


# Weight rows times 128 columns of the tokens x_0 to x_3, each (32, tokens): float32 (weight rows, tokens).
@jit
def _product(w_0, w_1, scale, x_0, x_1, x_2, x_3, FACTOR: tl.constexpr):
    if FACTOR == "group":
        a_0, a_1 = expand_shifted(w_0)
        a_2, a_3 = expand_shifted(w_1)
        product = tl.dot(a_0, x_0) * power(scale << 23)[:, None]
        product += tl.dot(a_1, x_1) * power(scale << 15)[:, None]
        product += tl.dot(a_2, x_2) * power(scale << 7)[:, None]
        product += tl.dot(a_3, x_3) * power(scale >> 1)[:, None]
    else:
        a_0, a_1 = expand_indexed(w_0, scale & 15, (scale >> 4) & 15)
        a_2, a_3 = expand_indexed(w_1, (scale >> 8) & 15, (scale >> 12) & 15)
        product = tl.dot(a_0, x_0)
        product = tl.dot(a_1, x_1, product)
        product = tl.dot(a_2, x_2, product)
        product = tl.dot(a_3, x_3, product)
        if FACTOR == "block":
            product *= power(scale)[:, None]
    return product


# What is left to multiply an accumulator by: the unit of its operands, and for rows their factor.
@jit
def _finished(acc, scale_ptrs, FACTOR: tl.constexpr):
    if FACTOR == "group":
        return acc * SHIFTED_UNIT
    elif FACTOR == "block":
        return acc * INDEXED_UNIT
    else:
        return acc * (power(tl.load(scale_ptrs)) * INDEXED_UNIT)[:, None]


# 128 weight rows from `column` on times the tokens in rows x_row of x: float32 (128, tokens). PAIR: and the 128 rows
# `apart` below them, else zeros. Pointers are those of the expert's weight, of N rows.
@jit
def _products(
    x_ptr, x_scale_ptr, stride_xg, x_row,
    w_ptr, w_scale_ptr, stride_wg, column, apart,
    N, K,
    BLOCK_M: tl.constexpr, STAGES: tl.constexpr, FACTOR: tl.constexpr, PAIR: tl.constexpr,
):  # fmt: skip
    w_row = column + tl.arange(0, _BLOCK)
    k = tl.arange(0, 32)
    x_ptrs = x_ptr + x_row[None, :].to(tl.int64) * K + k[:, None]
    w_ptrs = w_ptr + w_row[:, None] * 32 + k[None, :]
    w_scale_ptrs = w_scale_ptr + w_row
    first = tl.zeros((_BLOCK, BLOCK_M), tl.float32)
    second = first
    for step in tl.range(0, K // 128, num_stages=STAGES):
        w_0 = tl.load(w_ptrs, eviction_policy="evict_first")
        w_1 = tl.load(w_ptrs + N * 32, eviction_policy="evict_first")
        w_scale = tl.load(w_scale_ptrs)
        x_0 = tl.load(x_ptrs)
        x_1 = tl.load(x_ptrs + 32)
        x_2 = tl.load(x_ptrs + 64)
        x_3 = tl.load(x_ptrs + 96)
        x_scale = step_scale(x_scale_ptr, stride_xg, x_row, step, True)[None, :]
        first += _product(w_0, w_1, w_scale, x_0, x_1, x_2, x_3, FACTOR) * x_scale
        if PAIR:
            v_0 = tl.load(w_ptrs + apart * 32, eviction_policy="evict_first")
            v_1 = tl.load(w_ptrs + apart * 32 + N * 32, eviction_policy="evict_first")
            v_scale = tl.load(w_scale_ptrs + apart)
            second += _product(v_0, v_1, v_scale, x_0, x_1, x_2, x_3, FACTOR) * x_scale
        x_ptrs += 128
        w_ptrs += N * 64
        w_scale_ptrs += stride_wg
    w_scale_ptrs = w_scale_ptr + w_row
    first = _finished(first, w_scale_ptrs, FACTOR)
    if PAIR:
        second = _finished(second, w_scale_ptrs + apart, FACTOR)
    return first, second


# Part `index` of the listed tiles, PARTS of each: expert, first row, rows (0 or less: nothing to do).
@jit
def _listed(tiles_ptr, index, MAXT, BLOCK_M: tl.constexpr, PARTS: tl.constexpr):
    tile = index // PARTS
    expert = tl.load(tiles_ptr + tile)
    first_row = tl.load(tiles_ptr + MAXT + tile)
    rows = tl.load(tiles_ptr + 2 * MAXT + tile)
    start = index % PARTS * BLOCK_M
    return expert.to(tl.int64), first_row + start, tl.where(expert >= 0, rows - start, 0)


# BLOCK_M rows from `first` on, and which of them are the tile's. In place of the others, which may lie behind the last
# row of all, stands the first.
@jit
def _rows(first, rows, BLOCK_M: tl.constexpr):
    offset = tl.arange(0, BLOCK_M)
    live = offset < rows
    return first + tl.where(live, offset, 0), live


# The first `rows` of BLOCK_M rows times 128 gate and 128 up columns. Pointers are those of the expert.
@jit
def _gated_tile(
    x_ptr, x_scale_ptr, stride_xg, row_token_ptr,
    w_ptr, w_scale_ptr, stride_wg,
    bias_ptr, stride_bn,
    act_ptr, act_scale_ptr, stride_ag,
    first, rows, group, I, K, alpha, limit,
    BLOCK_M: tl.constexpr, STAGES: tl.constexpr, FACTOR: tl.constexpr, FORM: tl.constexpr, HAS_LIMIT: tl.constexpr,
):  # fmt: skip
    row, live = _rows(first, rows, BLOCK_M)
    token = tl.load(row_token_ptr + row)
    column = group * _BLOCK + tl.arange(0, _BLOCK)
    gate, up = _products(
        x_ptr, x_scale_ptr, stride_xg, token, w_ptr, w_scale_ptr, stride_wg, group * _BLOCK, I, 2 * I, K,
        BLOCK_M, STAGES, FACTOR, True,
    )  # fmt: skip
    if bias_ptr is not None:
        gate += tl.load(bias_ptr + column * stride_bn).to(tl.float32)[:, None]
        up += tl.load(bias_ptr + (I + column) * stride_bn).to(tl.float32)[:, None]
    act = gated(gate, up, alpha, limit, FORM, HAS_LIMIT)
    store_group(act_ptr, act_scale_ptr, stride_ag, act, row, live, group, I // _BLOCK, I, 0, True, True)


# Part of a token tile times 128 gate and 128 up columns, which is one quantisation group of the activation. NARROW:
# products 16 tokens wide where the tile has no more. Grid (I / 128 * parts of token tiles,).
@jit
def _gated_gemm_kernel(
    x_ptr, x_scale_ptr, stride_xg,
    row_token_ptr, tiles_ptr, MAXT,
    w_ptr, w_scale_ptr, stride_se, stride_wg,
    bias_ptr, stride_be, stride_bn,
    act_ptr, act_scale_ptr, stride_ag,
    I, K, alpha, limit,
    BLOCK_M: tl.constexpr, PARTS: tl.constexpr, NARROW: tl.constexpr, STAGES: tl.constexpr, FACTOR: tl.constexpr,
    FORM: tl.constexpr, HAS_LIMIT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    groups = I // _BLOCK
    group = tl.program_id(0) % groups
    expert, first, rows = _listed(tiles_ptr, tl.program_id(0) // groups, MAXT, BLOCK_M, PARTS)
    w_ptr += expert * I * K
    w_scale_ptr += expert * stride_se
    if bias_ptr is not None:
        bias_ptr += expert * stride_be
    if NARROW and rows > 0 and rows <= 16:
        _gated_tile(
            x_ptr, x_scale_ptr, stride_xg, row_token_ptr, w_ptr, w_scale_ptr, stride_wg, bias_ptr, stride_bn,
            act_ptr, act_scale_ptr, stride_ag, first, rows, group, I, K, alpha, limit,
            16, STAGES, FACTOR, FORM, HAS_LIMIT,
        )  # fmt: skip
    elif rows > 0:
        _gated_tile(
            x_ptr, x_scale_ptr, stride_xg, row_token_ptr, w_ptr, w_scale_ptr, stride_wg, bias_ptr, stride_bn,
            act_ptr, act_scale_ptr, stride_ag, first, rows, group, I, K, alpha, limit,
            BLOCK_M, STAGES, FACTOR, FORM, HAS_LIMIT,
        )  # fmt: skip


# The same times 128 columns of GEMM2.
@jit
def _down_tile(
    x_ptr, x_scale_ptr, stride_xg, w_ptr, w_scale_ptr, stride_wg, out_ptr, first, rows, first_column, N, K,
    BLOCK_M: tl.constexpr, STAGES: tl.constexpr, FACTOR: tl.constexpr,
):  # fmt: skip
    row, live = _rows(first, rows, BLOCK_M)
    out, _ = _products(
        x_ptr, x_scale_ptr, stride_xg, row, w_ptr, w_scale_ptr, stride_wg, first_column, 0, N, K,
        BLOCK_M, STAGES, FACTOR, False,
    )  # fmt: skip
    column = first_column + tl.arange(0, _BLOCK)
    out_ptrs = out_ptr + row[None, :].to(tl.int64) * N + column[:, None]
    tl.store(out_ptrs, out.to(tl.bfloat16), mask=live[None, :])


# Part of a token tile times 128 columns; NARROW as above. Grid (N / 128 * parts of token tiles,).
@jit
def _grouped_gemm_kernel(
    x_ptr, x_scale_ptr, stride_xg,
    tiles_ptr, MAXT,
    w_ptr, w_scale_ptr, stride_se, stride_wg,
    out_ptr,
    N, K,
    BLOCK_M: tl.constexpr, PARTS: tl.constexpr, NARROW: tl.constexpr, STAGES: tl.constexpr, FACTOR: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    blocks = N // _BLOCK
    first_column = tl.program_id(0) % blocks * _BLOCK
    expert, first, rows = _listed(tiles_ptr, tl.program_id(0) // blocks, MAXT, BLOCK_M, PARTS)
    w_ptr += expert * (N // 2) * K
    w_scale_ptr += expert * stride_se
    if NARROW and rows > 0 and rows <= 16:
        _down_tile(
            x_ptr, x_scale_ptr, stride_xg, w_ptr, w_scale_ptr, stride_wg, out_ptr, first, rows, first_column, N, K,
            16, STAGES, FACTOR,
        )  # fmt: skip
    elif rows > 0:
        _down_tile(
            x_ptr, x_scale_ptr, stride_xg, w_ptr, w_scale_ptr, stride_wg, out_ptr, first, rows, first_column, N, K,
            BLOCK_M, STAGES, FACTOR,
        )  # fmt: skip


def gated_gemm_gathered(
    outputs,
    *,
    x,
    x_scale,
    row_token,
    tiles,
    w,
    w_scale,
    block_m: int,
    bias,
    recipe: str,
    scale_format: str,
    weight_format: str,
    **attributes,
) -> None:
    """act[r] = gated(x[row_token[r]] @ w[e].T + bias[e]) for the rows r of every listed tile, quantised.

    float32 from the tensor cores to the one rounding, 128 columns a scale. Rows in no tile are not written.

    Args:
        outputs: act_q (R, I) e4m3; act_scale (R, ceil(I / 512)) int32 UE8M0, MN-major, bytes past the last group 0.
        x, x_scale: (T, K) e4m3 and (T, ceil(K / 512)) int32 UE8M0, MN-major.
        row_token: (R,) int32, the token of each row.
        tiles: (3, MAXT) int32: expert (-1: no tile), first row, rows (at most block_m) of each tile.
        w, w_scale: gate rows over up rows, (E, 2 I, K) in weight_format: see weight_format.FORMATS.
        block_m: 16, 32, 64 or 128.
        bias: (E, 2 I) float or None.
        recipe, scale_format: mxfp4, ue8m0.
        attributes: activation, swiglu_limit, gemm1_alpha, gemm1_clamp_limit of moe::silu_and_quant_contiguous.
    """
    act, act_scale = outputs
    I, K, MAXT = act.shape[1], x.shape[1], tiles.shape[1]
    if MAXT == 0:
        return
    formula, flags = formula_of("gated_gemm_gathered", recipe=recipe, scale_format=scale_format, **attributes)
    tile = choose_tile(True, weight_format, block_m, 2 * I // BLOCK * MAXT)
    _gated_gemm_kernel[(I // BLOCK * MAXT * tile.parts,)](
        x, x_scale, x_scale.stride(1), row_token, tiles, MAXT, *_weight(w, w_scale),
        *given(bias), act, act_scale, act_scale.stride(1), I, K, *formula,
        FORM=flags["FORM"], HAS_LIMIT=flags["HAS_LIMIT"], **_constants(tile, weight_format, block_m, x.device),
    )  # fmt: skip


def grouped_gemm_gathered(outputs, *, x, x_scale, tiles, w, w_scale, block_m: int, weight_format: str) -> None:
    """out[r] = x[r] @ w[e].T for the rows r of every listed tile. Rows in no tile are not written.

    Args:
        outputs: out (R, N) bfloat16.
        x, x_scale: (R, K) e4m3 and (R, ceil(K / 512)) int32 UE8M0, MN-major: gated_gemm_gathered's results.
        w, w_scale: (E, N, K) in weight_format.
        tiles, block_m: as for gated_gemm_gathered.
    """
    (out,) = outputs
    N, K, MAXT = out.shape[1], x.shape[1], tiles.shape[1]
    if MAXT == 0:
        return
    tile = choose_tile(False, weight_format, block_m, N // BLOCK * MAXT)
    _grouped_gemm_kernel[(N // BLOCK * MAXT * tile.parts,)](
        x, x_scale, x_scale.stride(1), tiles, MAXT, *_weight(w, w_scale), out, N, K,
        **_constants(tile, weight_format, block_m, x.device),
    )  # fmt: skip


def _weight(w, w_scale) -> tuple:
    return (w.view(torch.uint8), w_scale, w_scale.stride(0), w_scale.stride(2))


def _constants(tile: Tile, weight_format: str, block_m: int, device: torch.device) -> dict:
    sizes = dict(
        BLOCK_M=block_m // tile.parts, PARTS=tile.parts, NARROW=tile.narrow, FACTOR=FORMATS[weight_format].factor
    )
    how = dict(STAGES=tile.stages, num_stages=tile.stages, num_warps=tile.warps)
    if tile.resident:
        how["maxnreg"] = _REGISTERS // (tile.resident * tile.warps * 32) // 8 * 8
    return sizes | how | launch.pdl(device)
