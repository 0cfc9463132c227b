"""GEMM kernels of the gathered layout for Hopper and many rows an expert, in Gluon: fp8 blocks, tiles of 128 rows.

One program a multiprocessor walks over its tiles. Its twelve warps have three tasks: four bring operands, and two
groups of four multiply 64 rows each. That is what Triton's own loops cannot do: one group adds its product of 128
columns to the sum (the promotion that fp8 needs) while the tensor cores work for the other, and operands of the next
tile arrive while this one is written.

An item of work is a row tile times two blocks of 128 weight rows: gate and up of GEMM1, two neighbours of GEMM2.
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from moe_ops.arch import multiprocessors
from moe_ops.kernels import gathered_parts, launch, numeric
from moe_ops.kernels import silu_and_quant as activations

ROWS = 128
"""Rows of a tile."""
_SIDE = gl.constexpr(128)  # columns of a step, weight rows of a block
_STAGES = gl.constexpr(4)
_BRINGERS = gl.constexpr(128)  # threads that bring operands
_GROUP = 16  # row tiles that share a column block before the next
_OPERAND = gl.NVMMASharedLayout.get_default_for([128, 128], gl.float8e4nv)
_PRODUCT = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 32]))
_GATHER = gl.constexpr(gl.BlockedLayout([1, 16], [4, 8], [4, 1], [1, 0]))
_STORE_E4M3 = gl.constexpr(gl.BlockedLayout([1, 16], [4, 8], [4, 1], [1, 0]))
_STORE_BF16 = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0]))

_LINE = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))


def _jit(function):
    return launch.keyed(gluon.jit(function))


_walk = _jit(gathered_parts.walk.fn)
_gated = _jit(activations.gated.fn)
_finite_magnitude = _jit(numeric.finite_magnitude.fn)
_group_scale = _jit(numeric.group_scale.fn)
_divided = _jit(numeric.divided.fn)
_to_e4m3 = _jit(numeric.to_e4m3.fn)


# First weight rows of an item's two blocks.
@_jit
def _weight_rows(expert, block, N: gl.constexpr, GATED: gl.constexpr):
    if GATED:
        return expert * N + block * _SIDE, expert * N + N // 2 + block * _SIDE
    else:
        return expert * N + block * 2 * _SIDE, expert * N + (block * 2 + 1) * _SIDE


# Four warps: step by step, both weight blocks and the tile's rows of x. GEMM1's rows are gathered from the tokens;
# GEMM2's lie one behind the other, and those behind the tile's end belong to others and are not used.
@_jit
def _bring(
    x_ptr, x_desc, w_desc, row_token_ptr, tiles_ptr, x_parts, w_parts, full, empty, tiles,
    N: gl.constexpr, K: gl.constexpr, BLOCKS: gl.constexpr, GROUP: gl.constexpr, GATED: gl.constexpr,
):  # fmt: skip
    STEPS: gl.constexpr = K // _SIDE
    count = 0
    for item in range(gl.program_id(0), tiles * BLOCKS, gl.num_programs(0)):
        tile, block = _walk(item, tiles, BLOCKS, GROUP)
        expert = gl.load(tiles_ptr + tile)
        if expert >= 0:
            start = gl.load(tiles_ptr + tiles + tile)
            first, second = _weight_rows(expert, block, N, GATED)
            if GATED:
                valid = gl.load(tiles_ptr + 2 * tiles + tile)
                slot = gl.arange(0, _SIDE, layout=gl.SliceLayout(1, _GATHER))
                # Behind the last row copies of it: one token for all would be read by every multiprocessor at once.
                token = gl.load(row_token_ptr + start + gl.minimum(slot, valid - 1))
                column = gl.arange(0, _SIDE, layout=gl.SliceLayout(0, _GATHER))
                x_ptrs = x_ptr + gl.expand_dims(token.to(gl.int64) * K, 1) + gl.expand_dims(column, 0)
            for step in range(STEPS):
                stage = count % _STAGES
                mbarrier.wait(empty.index(stage), (count // _STAGES + 1) & 1)
                column_of = step * _SIDE
                if GATED:
                    mbarrier.expect(full.index(stage), 2 * _SIDE * _SIDE)
                else:
                    mbarrier.expect(full.index(stage), 3 * _SIDE * _SIDE)
                tma.async_copy_global_to_shared(w_desc, [first, column_of], full.index(stage), w_parts.index(2 * stage))
                tma.async_copy_global_to_shared(
                    w_desc, [second, column_of], full.index(stage), w_parts.index(2 * stage + 1)
                )
                if GATED:
                    async_copy.async_copy_global_to_shared(x_parts.index(stage), x_ptrs + column_of)
                    async_copy.mbarrier_arrive(full.index(stage), increment_count=False)
                else:
                    tma.async_copy_global_to_shared(x_desc, [start, column_of], full.index(stage), x_parts.index(stage))
                count += 1


# The sum is taken before the next product starts: the compiler would rather take it afterwards, but two products and
# two sums are more than the registers hold.
@_jit
def _now(values):
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [values], dtype=gl.float32, is_pure=False, pack=1)


# A value a column, read by one thread each, as a row of the products' layout.
@_jit
def _columns(values):
    return gl.expand_dims(gl.convert_layout(values.to(gl.float32), gl.SliceLayout(0, _PRODUCT)), 0)


# Four warps: 64 rows of every tile, from row HALF * 64 on.
@_jit
def _multiply(
    x_scale_ptr, stride_xg, w_scale_ptr, stride_se, row_token_ptr, tiles_ptr,
    bias_ptr, stride_be, stride_bn, out_ptr, out_scale_ptr, stride_og,
    x_parts, w_parts, full, empty, tiles, alpha, limit,
    HALF: gl.constexpr, N: gl.constexpr, K: gl.constexpr, BLOCKS: gl.constexpr, GROUP: gl.constexpr,
    GATED: gl.constexpr, FORM: gl.constexpr, HAS_LIMIT: gl.constexpr,
):  # fmt: skip
    STEPS: gl.constexpr = K // _SIDE
    ROW: gl.constexpr = gl.SliceLayout(1, _PRODUCT)
    zeros = gl.zeros((64, 128), gl.float32, _PRODUCT)
    slot = HALF * 64 + gl.arange(0, 64, layout=ROW)
    stride_xg = stride_xg.to(gl.int64)
    count = 0
    for item in range(gl.program_id(0), tiles * BLOCKS, gl.num_programs(0)):
        tile, block = _walk(item, tiles, BLOCKS, GROUP)
        expert = gl.load(tiles_ptr + tile)
        if expert >= 0:
            start = gl.load(tiles_ptr + tiles + tile)
            valid = gl.load(tiles_ptr + 2 * tiles + tile)
            if valid > HALF * 64:
                row = start + gl.minimum(slot, valid - 1)
                if GATED:
                    source = gl.load(row_token_ptr + row)
                else:
                    source = row
                x_scale_ptrs = x_scale_ptr + source
                first, second = _weight_rows(expert, block, N, GATED)
                scale_ptr = w_scale_ptr + expert.to(gl.int64) * stride_se
                first_ptr = scale_ptr + (first - expert * N) // _SIDE * STEPS
                second_ptr = scale_ptr + gl.minimum((second - expert * N) // _SIDE, N // _SIDE - 1) * STEPS
                left = zeros
                right = zeros
                if bias_ptr is not None:  # first in the sum: at its end there are no registers left for it
                    column = block * _SIDE + gl.arange(0, _SIDE, layout=_LINE)
                    bias_ptrs = bias_ptr + expert.to(gl.int64) * stride_be + column * stride_bn
                    left += _columns(gl.load(bias_ptrs))
                    right += _columns(gl.load(bias_ptrs + N // 2 * stride_bn))
                x_scale = gl.load(x_scale_ptrs)
                first_scale = gl.load(first_ptr)
                second_scale = gl.load(second_ptr)
                product = zeros  # its registers take every product in turn: use_acc is False
                for step in range(STEPS):
                    stage = count % _STAGES
                    ahead = gl.minimum(step + 1, STEPS - 1)
                    next_x = gl.load(x_scale_ptrs + ahead * stride_xg)
                    next_first = gl.load(first_ptr + ahead)
                    next_second = gl.load(second_ptr + ahead)
                    mbarrier.wait(full.index(stage), count // _STAGES & 1)
                    if GATED:
                        fence_async_shared()  # gathered rows were not written by the copy engine, but are read like its
                    x = x_parts.index(stage).slice(HALF * 64, 64)
                    product = warpgroup_mma(
                        x, w_parts.index(2 * stage).permute((1, 0)), product, use_acc=False, is_async=True
                    )
                    product = warpgroup_mma_wait(0, [product])
                    left = _now(left + product * gl.expand_dims(x_scale * first_scale, 1))
                    product = warpgroup_mma(
                        x, w_parts.index(2 * stage + 1).permute((1, 0)), product, use_acc=False, is_async=True
                    )
                    product = warpgroup_mma_wait(0, [product])
                    mbarrier.arrive(empty.index(stage))
                    right += product * gl.expand_dims(x_scale * second_scale, 1)
                    x_scale = next_x
                    first_scale = next_first
                    second_scale = next_second
                    count += 1
                if GATED:
                    I: gl.constexpr = N // 2
                    act = _gated(left, right, alpha, limit, FORM, HAS_LIMIT)
                    if bias_ptr is not None:  # whose columns take registers: one value after the other
                        act = _now(act)
                    scale, byte = _group_scale(gl.max(_finite_magnitude(act), 1), False, False)
                    q = _to_e4m3(_divided(act, gl.expand_dims(scale, 1), gl.expand_dims(byte, 1), False))
                    gl.store(out_scale_ptr + block * stride_og.to(gl.int64) + row, scale, mask=slot < valid)
                    _store(out_ptr, q, start, valid, block * _SIDE, I, I, HALF, _STORE_E4M3)
                else:
                    at = block * 2 * _SIDE
                    _store(out_ptr, left.to(gl.bfloat16), start, valid, at, N, N, HALF, _STORE_BF16)
                    _store(out_ptr, right.to(gl.bfloat16), start, valid, at + _SIDE, N, N, HALF, _STORE_BF16)
            else:  # no rows here, but the stages go round for both groups
                for _ in range(STEPS):
                    stage = count % _STAGES
                    mbarrier.wait(full.index(stage), count // _STAGES & 1)
                    mbarrier.arrive(empty.index(stage))
                    count += 1


# 64 rows of 128 columns, those of the tile and inside the matrix.
@_jit
def _store(
    out_ptr, values, start, valid, at, columns, stride,
    HALF: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    values = gl.convert_layout(values, LAYOUT)
    slot = HALF * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, LAYOUT))
    column = at + gl.arange(0, 128, layout=gl.SliceLayout(0, LAYOUT))
    ptrs = out_ptr + gl.expand_dims((start + slot).to(gl.int64) * stride, 1) + gl.expand_dims(column, 0)
    gl.store(ptrs, values, mask=gl.expand_dims(slot < valid, 1) & gl.expand_dims(column < columns, 0))


# Grid (multiprocessors,).
@_jit
def _pipelined_kernel(
    x_ptr, x_desc, x_scale_ptr, stride_xg,
    w_desc, w_scale_ptr, stride_se,
    row_token_ptr, tiles_ptr,
    bias_ptr, stride_be, stride_bn,
    out_ptr, out_scale_ptr, stride_og,
    tiles, alpha, limit,
    N: gl.constexpr, K: gl.constexpr, GROUP: gl.constexpr,
    GATED: gl.constexpr, FORM: gl.constexpr, HAS_LIMIT: gl.constexpr,
):  # fmt: skip
    BLOCKS: gl.constexpr = N // 256 if GATED else (N + 255) // 256
    x_parts = gl.allocate_shared_memory(gl.float8e4nv, [_STAGES, _SIDE, _SIDE], w_desc.layout)
    w_parts = gl.allocate_shared_memory(gl.float8e4nv, [2 * _STAGES, _SIDE, _SIDE], w_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(_STAGES):
        mbarrier.init(full.index(stage), count=1 + _BRINGERS if GATED else 1)  # gathered rows: one a thread
        mbarrier.init(empty.index(stage), count=2)  # both groups
    fence_async_shared()
    gl.warp_specialize(
        [
            (_multiply, (
                x_scale_ptr, stride_xg, w_scale_ptr, stride_se, row_token_ptr, tiles_ptr,
                bias_ptr, stride_be, stride_bn, out_ptr, out_scale_ptr, stride_og,
                x_parts, w_parts, full, empty, tiles, alpha, limit,
                0, N, K, BLOCKS, GROUP, GATED, FORM, HAS_LIMIT,
            )),
            (_multiply, (
                x_scale_ptr, stride_xg, w_scale_ptr, stride_se, row_token_ptr, tiles_ptr,
                bias_ptr, stride_be, stride_bn, out_ptr, out_scale_ptr, stride_og,
                x_parts, w_parts, full, empty, tiles, alpha, limit,
                1, N, K, BLOCKS, GROUP, GATED, FORM, HAS_LIMIT,
            )),
            (_bring, (
                x_ptr, x_desc, w_desc, row_token_ptr, tiles_ptr, x_parts, w_parts, full, empty, tiles,
                N, K, BLOCKS, GROUP, GATED,
            )),
        ],
        [4, 4],
        [224, 56],
    )  # fmt: skip


def fits(device: torch.device, kind: str, block_m: int) -> bool:
    """Whether these kernels compute such tiles: on Hopper, e4m3 with float32 scales, 128 rows."""
    return device.type != "cpu" and launch.capability(device)[0] == 9 and kind == "block" and block_m == ROWS


def gated_gemm(act, act_scale, x, x_scale, row_token, tiles, w, w_scale, bias, formula, flags) -> None:
    """GEMM1 and the activation: what moe_ops.kernels.gated_gemm computes, from the same arguments."""
    K, N = x.shape[1], 2 * act.shape[1]
    w_desc = _descriptor(w.view(-1, K))
    _launch(
        x, w_desc, x_scale, x_scale.stride(-1), w_desc, w_scale, w_scale.stride(0), row_token, tiles,
        *bias, act, act_scale, act_scale.stride(-1), tiles.shape[1], *formula,
        N=N, K=K, GROUP=_GROUP, GATED=True, FORM=flags["FORM"], HAS_LIMIT=flags["HAS_LIMIT"],
    )  # fmt: skip


def grouped_gemm(out, x, x_scale, tiles, w, w_scale) -> None:
    """GEMM2: what moe_ops.kernels.grouped_gemm_gathered computes, from the same arguments."""
    K, N = x.shape[1], out.shape[1]
    _launch(
        x, _descriptor(x), x_scale, x_scale.stride(-1), _descriptor(w.view(-1, K)), w_scale,
        w_scale.stride(0), tiles, tiles, None, 0, 0, out, x_scale, 0, tiles.shape[1], 1.0, 1.0,
        N=N, K=K, GROUP=_GROUP, GATED=False, FORM="silu", HAS_LIMIT=False,
    )  # fmt: skip


def _launch(x: torch.Tensor, *arguments, N: int, **constants) -> None:
    _pipelined_kernel[(multiprocessors(x.device),)](x, *arguments, N=N, **constants, num_warps=4)


def _descriptor(matrix: torch.Tensor) -> TensorDescriptor:
    return TensorDescriptor.from_tensor(matrix, [_SIDE.value, _SIDE.value], _OPERAND)
