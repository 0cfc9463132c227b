"""Triton kernel of moe::gemm_nt_fp8 and moe::gemm_nt_mxfp8: the tile of the grouped GEMMs, one weight for all rows."""

import torch
import triton
import triton.language as tl

from moe_ops import arch
from moe_ops.kernels.grouped_gemm import _tile, choose_tile, kind_of
from moe_ops.kernels.launch import jit
from moe_ops.recipes import DENSE, RECIPES

_GROUP = 8  # row tiles


# One tile. Tiles run down GROUP row tiles before they move to the next columns, so that neighbours share weights in L2.
# Grid (row tiles * column tiles,).
@jit
def _gemm_nt_kernel(
    x_ptr, x_scale_ptr, stride_xg,
    w_ptr, w_scale_ptr, stride_wg,
    out_ptr,
    M, N, K,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SWAP: tl.constexpr, STAGES: tl.constexpr,
    KIND: tl.constexpr, X_GROUP: tl.constexpr, EVEN_K: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    columns = tl.cdiv(N, BLOCK_N)
    above = tl.program_id(0) // (GROUP * columns) * GROUP
    height = tl.minimum(tl.cdiv(M, BLOCK_M) - above, GROUP)
    inside = tl.program_id(0) % (GROUP * columns)
    _tile(
        x_ptr, x_scale_ptr, stride_xg, w_ptr, w_scale_ptr, stride_wg,
        out_ptr, (above + inside % height) * BLOCK_M, M, M - 1, inside // height * BLOCK_N, N, K,
        BLOCK_M, BLOCK_N, BLOCK_K, SWAP, STAGES, KIND, X_GROUP, 1, EVEN_K,
    )  # fmt: skip


def multiply(op: str, out, x, x_scale, w, w_scale) -> None:
    """Into out, the product of the operands of a quantised dense GEMM."""
    recipe, (M, K), N = RECIPES[DENSE[op]], x.shape, len(w)
    packed = w_scale.dtype == torch.int32
    kind = kind_of(recipe, "ue8m0" if packed else "fp32")
    tile = choose_tile(arch.arch_of(op, x.device), kind, M)
    grid = (triton.cdiv(M, tile.rows) * triton.cdiv(N, tile.columns),)
    # fp32 block scales have a row per 128 weight rows, and the stride is that of rows; else that of words.
    stride = w_scale.stride(1 if packed else 0)
    _gemm_nt_kernel[grid](
        x, x_scale, x_scale.stride(1), w, w_scale, stride, out, M, N, K,
        KIND=kind, X_GROUP=recipe.x_group, EVEN_K=K % tile.depth == 0, GROUP=_GROUP, **tile.constants(),
    )  # fmt: skip


def gemm_nt_fp8(outputs, *, x, x_scale, w, w_scale) -> None:
    (out,) = outputs
    multiply("gemm_nt_fp8", out, x, x_scale, w, w_scale)
