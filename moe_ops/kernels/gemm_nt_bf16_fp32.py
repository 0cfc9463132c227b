"""Triton kernel of moe::gemm_nt_bf16_fp32. A router has few columns and a long K: few tiles, so K is divided."""

import triton
import triton.language as tl

from moe_ops import arch
from moe_ops.kernels.grouped_gemm import choose_tile
from moe_ops.kernels.launch import jit
from moe_ops.kernels.split import add_up, choose_splits, partial

_MOST_ROWS = 64
"""Of a tile: with the largest one there are few programs."""
_MOST_ROWS_UNALIGNED = 16
"""The same where rows are not multiples of 16 bytes: values are then loaded one by one, by a pointer each."""


# The float32 product of one tile over one range of K. SWAP: see grouped_gemm. Grid (row tiles, column tiles, ranges).
@jit
def _gemm_nt_bf16_fp32_kernel(
    x_ptr, w_ptr, out_ptr,
    M, N, K,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SWAP: tl.constexpr, STAGES: tl.constexpr,
    EVEN_K: tl.constexpr,
):  # fmt: skip
    split = tl.program_id(2)
    steps = tl.cdiv(tl.cdiv(K, BLOCK_K), tl.num_programs(2))
    first = split * steps
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    # Rows and columns outside are read from the last one inside, which costs no mask in the loop, and never stored.
    x_ptrs = x_ptr + tl.minimum(row, M - 1)[:, None].to(tl.int64) * K + k[None, :]
    w_ptrs = w_ptr + tl.minimum(column, N - 1)[:, None].to(tl.int64) * K + k[None, :]
    acc = tl.zeros((BLOCK_N, BLOCK_M) if SWAP else (BLOCK_M, BLOCK_N), tl.float32)
    for step in tl.range(first, tl.minimum(first + steps, tl.cdiv(K, BLOCK_K)), num_stages=STAGES):
        start = step * BLOCK_K
        if EVEN_K:
            x = tl.load(x_ptrs + start)
            w = tl.load(w_ptrs + start)
        else:
            x = tl.load(x_ptrs + start, mask=(start + k < K)[None, :], other=0.0)
            w = tl.load(w_ptrs + start, mask=(start + k < K)[None, :], other=0.0)
        acc = tl.dot(w, x.T, acc) if SWAP else tl.dot(x, w.T, acc)
    out = acc.T if SWAP else acc
    # From the tile's corner: the compiler sees constant distances then, where pointers of their own take the registers.
    out_ptr += (split.to(tl.int64) * M + tl.program_id(0) * BLOCK_M) * N + tl.program_id(1) * BLOCK_N
    out_ptrs = out_ptr + tl.arange(0, BLOCK_M)[:, None].to(tl.int64) * N + tl.arange(0, BLOCK_N)[None, :]
    tl.store(out_ptrs, out, mask=(row < M)[:, None] & (column < N)[None, :])


def gemm_nt_bf16_fp32(outputs, *, x, w) -> None:
    """moe::gemm_nt_bf16_fp32."""
    (out,) = outputs
    (M, K), N = x.shape, len(w)
    most = _MOST_ROWS if K % 8 == 0 else _MOST_ROWS_UNALIGNED
    tile = choose_tile(arch.arch_of("gemm_nt_bf16_fp32", x.device), "bf16", min(M, most))
    tiles = (triton.cdiv(M, tile.rows), triton.cdiv(N, tile.columns))
    splits = choose_splits(tiles[0] * tiles[1], triton.cdiv(K, tile.depth))
    partials = partial(out, splits)
    _gemm_nt_bf16_fp32_kernel[(*tiles, splits)](x, w, partials, M, N, K, EVEN_K=K % tile.depth == 0, **tile.constants())
    add_up(partials, out)
