"""Triton kernel of moe::hc_prenorm_gemm: x is read once, and both sums are made from it.

A float32 fn goes to the tensor cores as the sum of two bf16 matrices. x is bf16 already, so both products are exact up
to their float32 sums: 16 bits of fn's mantissa for the time of one tf32 product, which would keep 11 of them.
"""

import triton
import triton.language as tl

from moe_ops.kernels.launch import jit
from moe_ops.kernels.split import add_up, choose_splits, partial
from moe_ops.recipes import SPLIT_BLOCK

_ROWS, _MOST_COLUMNS = 64, 64


# BLOCK_M rows of one range of K times BLOCK_N rows of fn; the first column tile adds up the squares as well.
# Grid (row tiles, column tiles, ranges).
@jit
def _hc_prenorm_gemm_kernel(
    x_ptr, fn_ptr, out_ptr, sqr_sum_ptr,
    M, N, K,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    split = tl.program_id(2)
    blocks = K // BLOCK_K
    quotient, longer = blocks // tl.num_programs(2), blocks % tl.num_programs(2)
    first = split * quotient + tl.minimum(split, longer)
    end = first + quotient + (split < longer).to(tl.int32)
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    # Rows and columns outside are read from the last one inside, which costs no mask in the loop, and never stored.
    x_ptrs = x_ptr + tl.minimum(row, M - 1)[:, None].to(tl.int64) * K + k[None, :]
    fn_ptrs = fn_ptr + tl.minimum(column, N - 1)[:, None].to(tl.int64) * K + k[None, :]
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    squares = tl.zeros((BLOCK_M, BLOCK_K), tl.float32)
    for block in tl.range(first, end, num_stages=STAGES):
        x = tl.load(x_ptrs + block * BLOCK_K)
        fn = tl.load(fn_ptrs + block * BLOCK_K)
        high = fn.to(tl.bfloat16)
        low = (fn - high.to(tl.float32)).to(tl.bfloat16)
        acc = tl.dot(x, high.T, acc)
        acc = tl.dot(x, low.T, acc)
        wide = x.to(tl.float32)
        squares += wide * wide
    place = split.to(tl.int64) * M + row
    inside = row < M
    # The squares first: the pointers of the product need their registers.
    tl.store(sqr_sum_ptr + place, tl.sum(squares, 1), mask=inside & (tl.program_id(1) == 0))
    tl.store(out_ptr + place[:, None] * N + column[None, :], acc, mask=inside[:, None] & (column < N)[None, :])


def hc_prenorm_gemm(outputs, *, x, fn, num_splits) -> None:
    """moe::hc_prenorm_gemm."""
    (M, K), N = x.shape, len(fn)
    columns = min(_MOST_COLUMNS, max(16, triton.next_power_of_2(N)))
    tiles = (triton.cdiv(M, _ROWS), triton.cdiv(N, columns))
    splits = num_splits or choose_splits(tiles[0] * tiles[1], K // SPLIT_BLOCK)
    partials = outputs if num_splits else tuple(partial(result, splits) for result in outputs)
    _hc_prenorm_gemm_kernel[(*tiles, splits)](
        x, fn, *partials, M, N, K,
        BLOCK_M=_ROWS, BLOCK_N=columns, BLOCK_K=SPLIT_BLOCK, STAGES=4, num_warps=8, num_stages=4,
    )  # fmt: skip
    if not num_splits:
        for parts, result in zip(partials, outputs, strict=True):
            add_up(parts, result)
