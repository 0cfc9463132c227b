"""Triton kernels of moe::grouped_gemm_contiguous and moe::grouped_gemm_masked, for every recipe and scale format.

One source for all cards. With few rows an expert the operands are swapped: a tensor core multiplies at least 64 rows
(128 for Blackwell's block-scaled formats), so 128 weight rows take that side and 16 tokens the other.

- bf16: one chain of products.
- block: the product of each 128 columns of K is a sum of its own, scaled and added in float32. Hopper keeps an fp8
  chain in an accumulator of reduced precision; this bounds what that loses. packed: the same with UE8M0 words, a
  scale for every weight row.
- mx: tl.dot_scaled, which is one instruction on sm_100. Hopper multiplies exact bf16 copies of the operands.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from moe_ops.arch import arch_of
from moe_ops.kernels.launch import jit
from moe_ops.kernels.numeric import exponent_value
from moe_ops.recipes import Recipe, get_recipe
from moe_ops.rows import BLOCK

_BLOCK = tl.constexpr(BLOCK)


@dataclass(frozen=True)
class Tile:
    """What one program computes, and how: rows of x, rows of w, depth along K."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int
    swap: bool = False

    def constants(self) -> dict:
        sizes = dict(BLOCK_M=self.rows, BLOCK_N=self.columns, BLOCK_K=self.depth, SWAP=self.swap, STAGES=self.stages)
        return dict(**sizes, num_warps=self.warps, num_stages=self.stages)


# Kind of product -> tiles by rising rows; the first that holds an expert's mean rows is taken.
# Sizes that compile without spills on Triton 3.6 and 3.7 (tests/aot); not tuned on cards.
_HOPPER = {
    "bf16": (Tile(16, 128, 64, 4, 4, swap=True), Tile(64, 128, 64, 4, 4), Tile(128, 128, 64, 8, 3)),
    "block": (
        Tile(16, 128, 128, 4, 3, swap=True),
        Tile(32, 128, 128, 4, 3, swap=True),
        Tile(64, 128, 128, 4, 3),
        Tile(128, 128, 128, 8, 3),
    ),
    "packed": (
        Tile(16, 128, 128, 4, 3, swap=True),
        Tile(32, 128, 128, 4, 3, swap=True),
        Tile(64, 128, 128, 4, 3),
        Tile(128, 128, 128, 8, 2),
    ),
    "mx": (Tile(16, 128, 128, 4, 3, swap=True), Tile(64, 128, 128, 8, 3), Tile(128, 128, 128, 8, 3)),
}
_BLACKWELL = {
    "bf16": _HOPPER["bf16"],
    "block": (Tile(16, 128, 128, 4, 4, swap=True), Tile(64, 128, 128, 4, 3), Tile(128, 128, 128, 8, 3)),
    "packed": (Tile(16, 128, 128, 4, 4, swap=True), Tile(64, 128, 128, 4, 3), Tile(128, 64, 128, 8, 3)),
    "mx": (Tile(16, 128, 128, 4, 4, swap=True), Tile(64, 128, 128, 4, 3, swap=True), Tile(128, 128, 128, 4, 3)),
}
# The workstation cards have less shared memory.
_WORKSTATION = {**_HOPPER, "mx": (*_HOPPER["mx"][:2], Tile(128, 128, 128, 8, 2))}
TILES = {"cpu": _HOPPER, "sm90": _HOPPER, "sm100": _BLACKWELL, "sm120": _WORKSTATION}
"""arch -> kind -> tiles. cpu: the interpreter."""


def kind_of(recipe: Recipe, scale_format: str) -> str:
    """Which product weights in this form need: by what shares a scale, and by how scales are stored."""
    if not recipe.quantised:
        return "bf16"
    if recipe.w_block[0] == 1:
        return "mx"
    return "packed" if scale_format == "ue8m0" else "block"


def choose_tile(arch: str, kind: str, mean_rows: int) -> Tile:
    """The tile for experts of so many rows on average."""
    tiles = TILES[arch][kind]
    return next((tile for tile in tiles if tile.rows >= mean_rows), tiles[-1])


# The UE8M0 bytes of group `step` of each row as float32: byte step % 4 of word step // 4.
@jit
def _packed_scale(scale_ptr, stride_sg, index, step):
    word = tl.load(scale_ptr + step // 4 * stride_sg + index)
    return exponent_value((word >> (step % 4 * 8)) & 0xFF)


# (rows, 4) exponents of the 32-column groups of 128 columns: the four bytes of a word, or one byte for all of them.
@jit
def _exponents(scale_ptr, stride_sg, index, step, GROUP: tl.constexpr, ROWS: tl.constexpr):
    if GROUP == 32:
        word = tl.load(scale_ptr + step * stride_sg + index)
        return ((word[:, None] >> (tl.arange(0, 4) * 8)[None, :]) & 0xFF).to(tl.uint8)
    else:
        word = tl.load(scale_ptr + step // 4 * stride_sg + index)
        byte = (word >> (step % 4 * 8)) & 0xFF
        return tl.broadcast_to(byte[:, None], (ROWS, 4)).to(tl.uint8)


# BLOCK_M rows times BLOCK_N columns of one expert. Pointers are those of the rows' slab and of the expert's weight.
@jit
def _tile(
    x_ptr, x_scale_ptr, stride_xg,
    w_ptr, w_scale_ptr, stride_wg,
    out_ptr,
    first_row, end_row, last_row, first_column, N, K,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SWAP: tl.constexpr, STAGES: tl.constexpr,
    KIND: tl.constexpr, X_GROUP: tl.constexpr, W_PACK: tl.constexpr, EVEN_K: tl.constexpr,
):  # fmt: skip
    row = first_row + tl.arange(0, BLOCK_M)
    column = first_column + tl.arange(0, BLOCK_N)
    # Rows and columns outside are read from the last one inside, which costs no mask in the loop, and never stored.
    x_row = tl.minimum(row, last_row)
    w_row = tl.minimum(column, N - 1)
    stride_xg = tl.cast(stride_xg, tl.int64)
    stride_wg = tl.cast(stride_wg, tl.int64)
    k = tl.arange(0, BLOCK_K)
    k_packed = tl.arange(0, BLOCK_K // W_PACK)
    x_ptrs = x_ptr + x_row[:, None].to(tl.int64) * K + k[None, :]
    w_ptrs = w_ptr + w_row[:, None].to(tl.int64) * (K // W_PACK) + k_packed[None, :]
    acc = tl.zeros((BLOCK_N, BLOCK_M) if SWAP else (BLOCK_M, BLOCK_N), tl.float32)
    for step in tl.range(0, tl.cdiv(K, BLOCK_K), num_stages=STAGES):
        start = step * BLOCK_K
        if EVEN_K:
            x = tl.load(x_ptrs + start)
            w = tl.load(w_ptrs + start // W_PACK)
        else:  # never packed weights: their K is a multiple of 128
            x = tl.load(x_ptrs + start, mask=(start + k < K)[None, :], other=0.0)
            w = tl.load(w_ptrs + start, mask=(start + k < K)[None, :], other=0.0)
        if KIND == "bf16":
            acc = tl.dot(w, x.T, acc) if SWAP else tl.dot(x, w.T, acc)
        elif KIND == "block" or KIND == "packed":
            product = tl.dot(w, x.T) if SWAP else tl.dot(x, w.T)
            if KIND == "packed":
                x_scale = _packed_scale(x_scale_ptr, stride_xg, x_row, step)
                w_scale = _packed_scale(w_scale_ptr, stride_wg, w_row, step)
                product *= w_scale[:, None] if SWAP else w_scale[None, :]
            else:
                x_scale = tl.load(x_scale_ptr + step * stride_xg + x_row)
                x_scale *= tl.load(w_scale_ptr + first_column // _BLOCK * stride_wg + step)
            acc += product * (x_scale[None, :] if SWAP else x_scale[:, None])
        else:
            W_FORM: tl.constexpr = "e2m1" if W_PACK == 2 else "e4m3"
            x_scale = _exponents(x_scale_ptr, stride_xg, x_row, step, X_GROUP, BLOCK_M)
            w_scale = _exponents(w_scale_ptr, stride_wg, w_row, step, 32, BLOCK_N)
            if SWAP:
                acc = tl.dot_scaled(w, w_scale, W_FORM, x.T, x_scale, "e4m3", acc)
            else:
                acc = tl.dot_scaled(x, x_scale, "e4m3", w.T, w_scale, W_FORM, acc)
    out = acc.T if SWAP else acc
    out_ptrs = out_ptr + row[:, None].to(tl.int64) * N + column[None, :]
    tl.store(out_ptrs, out.to(tl.bfloat16), mask=(row < end_row)[:, None] & (column < N)[None, :])


# One tile; rows come in blocks of one expert each, and a tile whose first row has no expert has no rows at all.
# Tiles run down GROUP row tiles before they move to the next columns, so that neighbours share weights in L2.
# Grid (row tiles * column tiles,).
@jit
def _grouped_gemm_contiguous_kernel(
    x_ptr, x_scale_ptr, stride_xg,
    w_ptr, stride_we,
    w_scale_ptr, stride_se, stride_wg,
    m_indices_ptr,
    out_ptr,
    M, N, K,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SWAP: tl.constexpr, STAGES: tl.constexpr,
    KIND: tl.constexpr, X_GROUP: tl.constexpr, W_PACK: tl.constexpr, EVEN_K: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    columns = tl.cdiv(N, BLOCK_N)
    above = tl.program_id(0) // (GROUP * columns) * GROUP
    height = tl.minimum(M // BLOCK_M - above, GROUP)
    inside = tl.program_id(0) % (GROUP * columns)
    first_row = (above + inside % height) * BLOCK_M
    expert = tl.load(m_indices_ptr + first_row).to(tl.int64)
    if expert >= 0:
        _tile(
            x_ptr, x_scale_ptr, stride_xg,
            w_ptr + expert * stride_we, w_scale_ptr + expert * stride_se, stride_wg,
            out_ptr, first_row, M, M - 1, inside // height * BLOCK_N, N, K,
            BLOCK_M, BLOCK_N, BLOCK_K, SWAP, STAGES, KIND, X_GROUP, W_PACK, EVEN_K,
        )  # fmt: skip


# The row tiles of one slab, those of other workers left out; an empty slab ends at once. LOOP: there are fewer workers
# than row tiles. Grid (column tiles, workers, experts).
@jit
def _grouped_gemm_masked_kernel(
    x_ptr, stride_xe,
    x_scale_ptr, stride_xs, stride_xg,
    w_ptr, stride_we,
    w_scale_ptr, stride_se, stride_wg,
    masked_m_ptr,
    out_ptr, stride_oe,
    m_max, N, K,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SWAP: tl.constexpr, STAGES: tl.constexpr,
    KIND: tl.constexpr, X_GROUP: tl.constexpr, W_PACK: tl.constexpr, EVEN_K: tl.constexpr,
    LOOP: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(2).to(tl.int64)
    valid = tl.load(masked_m_ptr + expert)
    first_row = tl.program_id(1) * BLOCK_M
    x_ptr += expert * stride_xe
    x_scale_ptr += expert * stride_xs
    w_ptr += expert * stride_we
    w_scale_ptr += expert * stride_se
    out_ptr += expert * stride_oe
    if LOOP:
        for row in tl.range(first_row, valid, tl.num_programs(1) * BLOCK_M, num_stages=1):
            _tile(
                x_ptr, x_scale_ptr, stride_xg, w_ptr, w_scale_ptr, stride_wg,
                out_ptr, row, valid, m_max - 1, tl.program_id(0) * BLOCK_N, N, K,
                BLOCK_M, BLOCK_N, BLOCK_K, SWAP, STAGES, KIND, X_GROUP, W_PACK, EVEN_K,
            )  # fmt: skip
    elif first_row < valid:
        _tile(
            x_ptr, x_scale_ptr, stride_xg, w_ptr, w_scale_ptr, stride_wg,
            out_ptr, first_row, valid, m_max - 1, tl.program_id(0) * BLOCK_N, N, K,
            BLOCK_M, BLOCK_N, BLOCK_K, SWAP, STAGES, KIND, X_GROUP, W_PACK, EVEN_K,
        )  # fmt: skip


def grouped_gemm_contiguous(outputs, *, x, x_scale, w, w_scale, m_indices, ends, recipe) -> None:
    """moe::grouped_gemm_contiguous."""
    (out,) = outputs
    M, E = len(x), len(w)
    row = get_recipe("grouped_gemm_contiguous", recipe)
    constants = _constants(row, x, w_scale)
    # The rows are the worst case of a routing (rows.contiguous_rows): a block an expert, then full blocks.
    tile = choose_tile(arch_of("grouped_gemm", x.device), constants["KIND"], max(1, M - E * BLOCK) // E)
    grid = (M // tile.rows * triton.cdiv(w.shape[1], tile.columns),)
    x_scales, weights = _scales(row, x_scale, w, w_scale)
    _grouped_gemm_contiguous_kernel[grid](
        x, *x_scales[::2], *weights, m_indices, out, M, w.shape[1], x.shape[-1],
        GROUP=8, **constants, **tile.constants(),
    )  # fmt: skip


def grouped_gemm_masked(outputs, *, x, x_scale, w, w_scale, masked_m, expected_m, recipe) -> None:
    """moe::grouped_gemm_masked."""
    (out,) = outputs
    E, m_max = x.shape[:2]
    row = get_recipe("grouped_gemm_masked", recipe)
    constants = _constants(row, x, w_scale)
    tile = choose_tile(arch_of("grouped_gemm", x.device), constants["KIND"], expected_m)
    # A tile of the largest size has a program of its own; smaller ones are many, and most of them empty.
    tiles = max(1, triton.cdiv(m_max, tile.rows))
    workers = tiles if tile.rows == BLOCK else min(tiles, max(1, triton.cdiv(expected_m, tile.rows)))
    grid = (triton.cdiv(w.shape[1], tile.columns), workers, E)
    x_scales, weights = _scales(row, x_scale, w, w_scale)
    _grouped_gemm_masked_kernel[grid](
        x, x.stride(0), *x_scales, *weights, masked_m, out, out.stride(0), m_max, w.shape[1], x.shape[-1],
        LOOP=workers < tiles, **constants, **tile.constants(),
    )  # fmt: skip


def _scales(row: Recipe, x_scale, w, w_scale) -> tuple[tuple, tuple]:
    """((x_scale, its slab and group strides), (w, its expert stride, w_scale, its expert and group strides))."""
    w = w.view(torch.uint8) if row.w_pack == 2 else w
    if not row.quantised:
        return (w, 0, 0), (w, w.stride(0), w, 0, 0)  # a pointer for what is never read
    # fp32 block scales have a row per 128 weight rows, and the stride is that of rows; else that of words.
    stride = w_scale.stride(1) if w_scale.dtype == torch.float32 else w_scale.stride(2)
    slab = x_scale.stride(0) if x_scale.dim() == 3 else 0
    return (x_scale, slab, x_scale.stride(-1)), (w, w.stride(0), w_scale, w_scale.stride(0), stride)


def _constants(row: Recipe, x, w_scale) -> dict:
    packed = row.quantised and w_scale.dtype == torch.int32
    depth = 128 if row.quantised else 64
    kind = kind_of(row, "ue8m0" if packed else "fp32")
    return dict(KIND=kind, X_GROUP=row.x_group, W_PACK=row.w_pack, EVEN_K=x.shape[-1] % depth == 0)
