"""Triton kernels of moe::pre_permute_gathered: one launch, or two for many routes.

Tokens are quantised once and stay where they are; routes are sorted by expert, in source order, and cut into tiles of
one expert. Programs that sort and programs that quantise share the launch: neither waits for the other.
"""

import triton
import triton.language as tl

from moe_ops.kernels.launch import gdc_launch_dependents, gdc_wait, jit, pdl
from moe_ops.kernels.numeric import pack_words, quantize_groups
from moe_ops.kernels.pre_permute import sum_chunks
from moe_ops.recipes import get_recipe
from moe_ops.rows import ROUTE_CHUNK

_HELD = 2048  # routes that a program holds at once where it scans all
_SCANNED = 8192  # up to here every expert's program scans all routes; longer lists are counted by chunks first


# Local experts of routes, E for those of other ranks and behind the last.
@jit
def _experts(ids_ptr, stride_it, stride_ij, route, routes, expert_start, E, TOP_K: tl.constexpr):
    ids_ptrs = ids_ptr + (route // TOP_K).to(tl.int64) * stride_it + route % TOP_K * stride_ij
    ids = tl.load(ids_ptrs, mask=route < routes, other=-1)
    local = ids - expert_start
    return tl.where((ids >= 0) & (local >= 0) & (local < E), local, E).to(tl.int32)


# The tiles of one expert from tile `first` on: (expert, first row, rows).
@jit
def _list_tiles(tiles_ptr, tiles, first, expert, start, count, BLOCK_M: tl.constexpr):
    number = tl.cdiv(count, BLOCK_M)
    for base in range(0, number, 32):
        index = base + tl.arange(0, 32)
        inside = index < number
        ptrs = tiles_ptr + first + index
        tl.store(ptrs, tl.full((32,), 0, tl.int32) + expert, mask=inside)
        tl.store(ptrs + tiles, start + index * BLOCK_M, mask=inside)
        tl.store(ptrs + 2 * tiles, tl.minimum(count - index * BLOCK_M, BLOCK_M), mask=inside)


# Tiles from `first` on have no expert.
@jit
def _end_tiles(tiles_ptr, tiles, first):
    for base in range(first, tiles, 256):
        index = base + tl.arange(0, 256)
        tl.store(tiles_ptr + index, tl.full((256,), -1, tl.int32), mask=index < tiles)


# One token, quantised whole.
@jit
def _quantize_token(
    x_ptr, stride_xt, stride_xk, q_ptr, scale_ptr, stride_sg, token, K,
    WORDS: tl.constexpr, GROUP: tl.constexpr, QUANTISED: tl.constexpr, UE8M0: tl.constexpr,
):  # fmt: skip
    word = tl.arange(0, WORDS)
    group = word[:, None] * 4 + tl.arange(0, 4)[None, :]
    column = group[:, :, None] * GROUP + tl.arange(0, GROUP)[None, None, :]
    token = token.to(tl.int64)
    raw = tl.load(x_ptr + token * stride_xt + column.to(tl.int64) * stride_xk, mask=column < K, other=0.0)
    q_ptrs = q_ptr + token * K + column
    if QUANTISED:
        inside = group * GROUP < K
        q, scale, byte = quantize_groups(raw.to(tl.float32), UE8M0)
        tl.store(q_ptrs, q, mask=column < K)
        if UE8M0:
            words = pack_words(tl.where(inside, byte, 0))  # bytes past the last group are 0
            tl.store(scale_ptr + word.to(tl.int64) * stride_sg + token, words, mask=word * 4 * GROUP < K)
        else:
            tl.store(scale_ptr + group.to(tl.int64) * stride_sg + token, scale, mask=inside)
    else:
        tl.store(q_ptrs, raw.to(q_ptr.dtype.element_ty), mask=column < K)


# Programs below E: the rows and tiles of one expert, from a scan of all routes; routes of other ranks are shared out
# among them. The others: one token each. Grid (E + tokens,).
@jit
def _sort_kernel(
    ids_ptr, stride_it, stride_ij,
    src2dst_ptr, row_token_ptr, tiles_ptr,
    x_ptr, stride_xt, stride_xk, q_ptr, scale_ptr, stride_sg,
    routes, tiles, E, K, expert_start,
    TOP_K: tl.constexpr, EP: tl.constexpr, BLOCK_M: tl.constexpr, CHUNK: tl.constexpr,
    WORDS: tl.constexpr, GROUP: tl.constexpr, QUANTISED: tl.constexpr, UE8M0: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
    expert = tl.program_id(0)
    if expert >= E:
        _quantize_token(
            x_ptr, stride_xt, stride_xk, q_ptr, scale_ptr, stride_sg, expert - E, K, WORDS, GROUP, QUANTISED, UE8M0,
        )  # fmt: skip
    else:
        lane = tl.arange(0, EP)
        counts = tl.zeros((EP,), tl.int32)
        for base in range(0, routes, CHUNK):
            route = base + tl.arange(0, CHUNK)
            local = _experts(ids_ptr, stride_it, stride_ij, route, routes, expert_start, E, TOP_K)
            counts += tl.histogram(tl.where(local < E, local, 0), EP, mask=local < E)
        start = tl.sum(tl.where(lane < expert, counts, 0), 0)
        count = tl.sum(tl.where(lane == expert, counts, 0), 0)
        first = tl.sum(tl.where(lane < expert, tl.cdiv(counts, BLOCK_M), 0), 0)
        _list_tiles(tiles_ptr, tiles, first, expert, start, count, BLOCK_M)
        if expert == E - 1:
            _end_tiles(tiles_ptr, tiles, first + tl.cdiv(count, BLOCK_M))
        for base in range(0, routes, CHUNK):
            route = base + tl.arange(0, CHUNK)
            local = _experts(ids_ptr, stride_it, stride_ij, route, routes, expert_start, E, TOP_K)
            mine = (local == expert).to(tl.int32)
            row = start + tl.cumsum(mine, 0) - mine
            start += tl.sum(mine, 0)
            tl.store(row_token_ptr + row, route // TOP_K, mask=mine > 0)
            foreign = (local == E) & (base // CHUNK % E == expert) & (route < routes)
            tl.store(src2dst_ptr + route, tl.where(mine > 0, row, -1), mask=(mine > 0) | foreign)


# Programs below `chunks`: routes per expert of one chunk. The others: one token each. Grid (chunks + tokens,).
@jit
def _count_kernel(
    ids_ptr, stride_it, stride_ij,
    counts_ptr,
    x_ptr, stride_xt, stride_xk, q_ptr, scale_ptr, stride_sg,
    routes, chunks, E, K, expert_start,
    TOP_K: tl.constexpr, EP: tl.constexpr, CHUNK: tl.constexpr,
    WORDS: tl.constexpr, GROUP: tl.constexpr, QUANTISED: tl.constexpr, UE8M0: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
    chunk = tl.program_id(0)
    if chunk >= chunks:
        _quantize_token(
            x_ptr, stride_xt, stride_xk, q_ptr, scale_ptr, stride_sg, chunk - chunks, K, WORDS, GROUP, QUANTISED, UE8M0,
        )  # fmt: skip
    else:
        route = chunk * CHUNK + tl.arange(0, CHUNK)
        local = _experts(ids_ptr, stride_it, stride_ij, route, routes, expert_start, E, TOP_K)
        lane = tl.arange(0, EP)
        counts = tl.histogram(tl.where(local < E, local, 0), EP, mask=local < E)
        tl.store(counts_ptr + chunk.to(tl.int64) * E + lane, counts, mask=lane < E)


# The rows of one chunk's routes, by a sort of them by expert, and the tiles of every chunks-th expert. Grid (chunks,).
@jit
def _place_kernel(
    ids_ptr, stride_it, stride_ij,
    counts_ptr, base_ptr,
    src2dst_ptr, row_token_ptr, tiles_ptr,
    routes, tiles, E, expert_start,
    TOP_K: tl.constexpr, EP: tl.constexpr, BLOCK_M: tl.constexpr, CHUNK: tl.constexpr, BLOCK_C: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    chunk = tl.program_id(0)
    chunks = tl.num_programs(0)
    lane = tl.arange(0, EP)
    total, before, own = sum_chunks(counts_ptr, chunk, chunks, E, EP, BLOCK_C)
    start = tl.cumsum(total, 0) - total
    # Row of a sorted route = its place in the sorted chunk + base of its expert.
    base_ptr += chunk.to(tl.int64) * E
    tl.store(base_ptr + lane, start + before - (tl.cumsum(own, 0) - own), mask=lane < E)
    numbers = tl.cdiv(total, BLOCK_M)
    for expert in range(chunk, E, chunks):
        one = lane == expert
        first = tl.sum(tl.where(lane < expert, numbers, 0), 0)
        _list_tiles(
            tiles_ptr, tiles, first, expert, tl.sum(tl.where(one, start, 0), 0), tl.sum(tl.where(one, total, 0), 0),
            BLOCK_M,
        )  # fmt: skip
    if chunk == 0:
        _end_tiles(tiles_ptr, tiles, tl.sum(numbers, 0))
    route = tl.arange(0, CHUNK)
    local = _experts(ids_ptr, stride_it, stride_ij, chunk * CHUNK + route, routes, expert_start, E, TOP_K)
    key = tl.sort(local * CHUNK + route)
    tl.debug_barrier()  # base is written by other threads than those that read it
    of = key // CHUNK
    row = route + tl.load(base_ptr + of, mask=of < E, other=0)
    source = chunk * CHUNK + key % CHUNK
    tl.store(row_token_ptr + row, source // TOP_K, mask=of < E)
    tl.store(src2dst_ptr + source, tl.where(of < E, row, -1), mask=source < routes)


def pre_permute_gathered(
    outputs, *, hidden_states, topk_ids, num_local_experts, block_m, expert_start, recipe, scale_format
) -> None:
    """moe::pre_permute_gathered."""
    q, scale, row_token, tiles, src2dst, scratch = outputs
    T, top_k = topk_ids.shape
    E, K, routes, count = num_local_experts, hidden_states.shape[1], T * top_k, tiles.shape[1]
    row = get_recipe("pre_permute_gathered", recipe)
    group = row.x_group or 128
    flags = dict(TOP_K=top_k, EP=triton.next_power_of_2(E))
    quantise = dict(
        WORDS=triton.next_power_of_2(triton.cdiv(K, 4 * group)), GROUP=group, QUANTISED=row.quantised,
        UE8M0=scale_format == "ue8m0",
    )  # fmt: skip
    ids = (topk_ids, *topk_ids.stride())
    tokens = (hidden_states, *hidden_states.stride(), q, scale, scale.stride(-1))
    dependent = pdl(hidden_states.device)
    first = dict(PDL=dependent["PDL"], num_warps=8 if K > 4096 else 4)  # plain: whoever wrote the inputs has finished
    if routes <= _SCANNED:
        chunk = max(32, min(_HELD, triton.next_power_of_2(max(routes, 1))))
        _sort_kernel[(E + T,)](
            *ids, src2dst, row_token, tiles, *tokens, routes, count, E, K, expert_start,
            BLOCK_M=block_m, CHUNK=chunk, **flags, **quantise, **first,
        )  # fmt: skip
        return
    chunks = triton.cdiv(routes, ROUTE_CHUNK)
    counts, base = scratch.view(2, -1)
    _count_kernel[(chunks + T,)](
        *ids, counts, *tokens, routes, chunks, E, K, expert_start, CHUNK=ROUTE_CHUNK, **flags, **quantise, **first,
    )  # fmt: skip
    _place_kernel[(chunks,)](
        *ids, counts, base, src2dst, row_token, tiles, routes, count, E, expert_start,
        BLOCK_M=block_m, CHUNK=ROUTE_CHUNK, BLOCK_C=max(1, 4096 // flags["EP"]), num_warps=8, **flags, **dependent,
    )  # fmt: skip
