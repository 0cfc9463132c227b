"""Triton kernels of moe::pre_permute_contiguous and moe::pre_permute_masked: two launches, or three for many routes.

Routing first: every route gets its row, every expert its rows, from ids alone. Then one program reads a token once,
quantises it and writes it to each of its rows. A token has one row per distinct expert, and rows follow source order,
so an expert's slots are the ranks of the tokens that name it.
"""

import triton
import triton.language as tl

from moe_ops.kernels.launch import gdc_launch_dependents, gdc_wait, jit, pdl
from moe_ops.kernels.numeric import pack_words, quantize_groups
from moe_ops.recipes import get_recipe
from moe_ops.rows import BLOCK, ROUTE_CHUNK

_BLOCK = tl.constexpr(BLOCK)
_HELD = 1024  # routes that a program holds at once where it scans all
_SCANNED = 4096  # up to here every expert's program scans all routes: in one launch


# Ids of a block of tokens, (BLOCK_T, KP), as given and as local experts; -1 for those of other ranks.
@jit
def _read_ids(ids_ptr, stride_it, stride_ij, token, T, expert_start, E, TOP_K: tl.constexpr, KP: tl.constexpr):
    route = tl.arange(0, KP)[None, :]
    ids_ptrs = ids_ptr + token[:, None].to(tl.int64) * stride_it + route * stride_ij
    ids = tl.load(ids_ptrs, mask=(token < T)[:, None] & (route < TOP_K), other=-1)
    local = ids - expert_start
    here = (ids >= 0) & (local >= 0) & (local < E)
    return ids, tl.where(here, local, -1).to(tl.int32)


# For each route, the first of its token with the same id.
@jit
def _first_route(ids_ptr, stride_it, stride_ij, token, T, ids, TOP_K: tl.constexpr, KP: tl.constexpr):
    first = tl.zeros_like(ids).to(tl.int32) + tl.arange(0, KP)[None, :]
    for route in range(TOP_K):
        other = tl.load(ids_ptr + token.to(tl.int64) * stride_it + route * stride_ij, mask=token < T, other=-1)
        first = tl.where((ids == other[:, None]) & (first > route), route, first)
    return first


# Distinct (token, expert) pairs per expert.
@jit
def _count(local, first, BLOCK_T: tl.constexpr, KP: tl.constexpr, EP: tl.constexpr):
    owner = (local >= 0) & (first == tl.arange(0, KP)[None, :])
    flat = tl.reshape(tl.where(owner, local, 0), (BLOCK_T * KP,))
    return tl.histogram(flat, EP, mask=tl.reshape(owner, (BLOCK_T * KP,)))


@jit
def _padded(counts):
    return (counts + _BLOCK - 1) // _BLOCK * _BLOCK


# The labels of one expert's rows, -1 behind the valid ones up to the end of the block.
@jit
def _label(m_indices_ptr, start, count, expert):
    for row in range(0, count, _BLOCK):
        slot = row + tl.arange(0, _BLOCK)
        tl.store(m_indices_ptr + start + slot, tl.where(slot < count, expert, -1))


@jit
def _label_tail(m_indices_ptr, end, M, part, parts):
    for row in range(end + part * _BLOCK, M, parts * _BLOCK):
        tl.store(m_indices_ptr + row + tl.arange(0, _BLOCK), tl.full((_BLOCK,), -1, tl.int32))


# One expert: where its rows start, the row of each route that names it, its labels or its count. It reads all ids.
# Routes of other ranks are shared out among the programs. Grid (experts,).
@jit
def _route_kernel(
    ids_ptr, stride_it, stride_ij,
    src2dst_ptr,
    rows_ptr, ends_ptr,
    T, M, E, expert_start,
    TOP_K: tl.constexpr, KP: tl.constexpr, EP: tl.constexpr, BLOCK_T: tl.constexpr, MASKED: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    expert = tl.program_id(0)
    if MASKED:
        start = expert * M  # M is the rows of a slab
        end = 0
    else:
        counts = tl.zeros((EP,), tl.int32)
        for base in range(0, T, BLOCK_T):
            token = base + tl.arange(0, BLOCK_T)
            ids, local = _read_ids(ids_ptr, stride_it, stride_ij, token, T, expert_start, E, TOP_K, KP)
            first = _first_route(ids_ptr, stride_it, stride_ij, token, T, ids, TOP_K, KP)
            counts += _count(local, first, BLOCK_T, KP, EP)
        rows = _padded(counts)
        start = tl.sum(tl.where(tl.arange(0, EP) < expert, rows, 0), 0)
        end = tl.sum(rows, 0)
    count = 0
    for base in range(0, T, BLOCK_T):
        token = base + tl.arange(0, BLOCK_T)
        ids, local = _read_ids(ids_ptr, stride_it, stride_ij, token, T, expert_start, E, TOP_K, KP)
        named = local == expert
        has = tl.max(named.to(tl.int32), 1)
        row = start + count + tl.cumsum(has, 0) - has
        count += tl.sum(has, 0)
        route = tl.arange(0, KP)[None, :]
        mine = named | ((local < 0) & (base // BLOCK_T % E == expert))
        src2dst_ptrs = src2dst_ptr + token[:, None].to(tl.int64) * TOP_K + route
        tl.store(src2dst_ptrs, tl.where(named, row[:, None], -1), mask=(token < T)[:, None] & (route < TOP_K) & mine)
    if MASKED:
        tl.store(rows_ptr + expert, count)
    else:
        tl.store(ends_ptr + expert, start + count)
        _label(rows_ptr, start, count, expert)
        _label_tail(rows_ptr, end, M, expert, E)


# Rows per expert of one chunk of BLOCK_T tokens. Grid (chunks,).
@jit
def _count_kernel(
    ids_ptr, stride_it, stride_ij,
    counts_ptr,
    T, E, expert_start,
    TOP_K: tl.constexpr, KP: tl.constexpr, EP: tl.constexpr, BLOCK_T: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    ids, local = _read_ids(ids_ptr, stride_it, stride_ij, token, T, expert_start, E, TOP_K, KP)
    first = _first_route(ids_ptr, stride_it, stride_ij, token, T, ids, TOP_K, KP)
    expert = tl.arange(0, EP)
    counts_ptrs = counts_ptr + tl.program_id(0).to(tl.int64) * E + expert
    tl.store(counts_ptrs, _count(local, first, BLOCK_T, KP, EP), mask=expert < E)


# Of every expert's routes: all, those of the chunks before this one, and its own. Also for pre_permute_gathered.
@jit
def sum_chunks(counts_ptr, chunk, chunks, E, EP: tl.constexpr, BLOCK_C: tl.constexpr):
    expert = tl.arange(0, EP)
    total = tl.zeros((EP,), tl.int32)
    before = tl.zeros((EP,), tl.int32)
    for first_chunk in range(0, chunks, BLOCK_C):
        other = first_chunk + tl.arange(0, BLOCK_C)[:, None]
        counts_ptrs = counts_ptr + other.to(tl.int64) * E + expert[None, :]
        counts = tl.load(counts_ptrs, mask=(other < chunks) & (expert < E)[None, :], other=0)
        total += tl.sum(counts, 0)
        before += tl.sum(tl.where(other < chunk, counts, 0), 0)
    own = tl.load(counts_ptr + chunk.to(tl.int64) * E + expert, mask=expert < E, other=0)
    return total, before, own


# The rows of one chunk's routes, by a sort of its routes by expert, and the labels of every chunks-th expert.
# Grid (chunks,).
@jit
def _place_kernel(
    ids_ptr, stride_it, stride_ij,
    counts_ptr, base_ptr,
    src2dst_ptr,
    rows_ptr, ends_ptr,
    T, M, E, expert_start,
    TOP_K: tl.constexpr, KP: tl.constexpr, EP: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr,
    MASKED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    chunk = tl.program_id(0)
    chunks = tl.num_programs(0)
    expert = tl.arange(0, EP)
    total, before, own = sum_chunks(counts_ptr, chunk, chunks, E, EP, BLOCK_C)
    rows = _padded(total)
    if MASKED:
        start = expert * M
    else:
        start = tl.cumsum(rows, 0) - rows
    # Row of a sorted route = its place in the sorted chunk + base of its expert.
    base_ptr += chunk.to(tl.int64) * E
    tl.store(base_ptr + expert, start + before - (tl.cumsum(own, 0) - own), mask=expert < E)

    token = chunk * BLOCK_T + tl.arange(0, BLOCK_T)
    ids, local = _read_ids(ids_ptr, stride_it, stride_ij, token, T, expert_start, E, TOP_K, KP)
    first = _first_route(ids_ptr, stride_it, stride_ij, token, T, ids, TOP_K, KP)
    route = tl.arange(0, KP)[None, :]
    owner = (local >= 0) & (first == route)
    CHUNK: tl.constexpr = BLOCK_T * KP
    place = tl.arange(0, CHUNK)
    key = tl.sort(tl.reshape(tl.where(owner, local, E), (CHUNK,)) * CHUNK + place)
    tl.debug_barrier()  # base is written by other threads than those that read it
    of = key // CHUNK
    row = place + tl.load(base_ptr + of, mask=of < E, other=0)
    source = (chunk * BLOCK_T + key % CHUNK // KP).to(tl.int64) * TOP_K + key % KP
    tl.store(src2dst_ptr + source, row, mask=of < E)
    tl.debug_barrier()  # a repeated route takes the row of its token's first
    src2dst_ptrs = src2dst_ptr + token[:, None].to(tl.int64) * TOP_K
    inside = (token < T)[:, None] & (route < TOP_K)
    row_of_first = tl.load(src2dst_ptrs + first, mask=inside & (local >= 0) & (first < route), other=-1)
    tl.store(src2dst_ptrs + route, row_of_first, mask=inside & (first < route) | inside & (local < 0))

    if MASKED:
        tl.store(rows_ptr + expert, total, mask=(expert < E) & (chunk == 0))
    else:
        tl.store(ends_ptr + expert, start + total, mask=(expert < E) & (chunk == 0))
        for label in range(chunk, E, chunks):
            count = tl.sum(tl.where(expert == label, total, 0), 0)
            _label(rows_ptr, tl.sum(tl.where(expert == label, start, 0), 0), count, label)
        _label_tail(rows_ptr, tl.sum(rows, 0), M, chunk, chunks)


# Columns of one token: read once, quantised, written to each of its rows. Grid (tokens, column blocks).
@jit
def _scatter_kernel(
    x_ptr, stride_xt, stride_xk,
    src2dst_ptr,
    q_ptr,
    scale_ptr, stride_se, stride_sg,
    K, m_max,
    TOP_K: tl.constexpr, GROUP: tl.constexpr, WORDS: tl.constexpr, SLABS: tl.constexpr, QUANTISED: tl.constexpr,
    UE8M0: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    word = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
    group = word[:, None] * 4 + tl.arange(0, 4)[None, :]
    column = group[:, :, None] * GROUP + tl.arange(0, GROUP)[None, None, :]
    x_ptrs = x_ptr + token * stride_xt + column.to(tl.int64) * stride_xk
    raw = tl.load(x_ptrs, mask=column < K, other=0.0)
    x = raw.to(tl.float32)
    inside = group * GROUP < K
    if QUANTISED:
        q, scale, byte = quantize_groups(x, UE8M0)
        if UE8M0:
            words = pack_words(tl.reshape(tl.where(inside, byte, 0), (WORDS, 4)))  # bytes past the last group are 0
    else:
        q = raw.to(q_ptr.dtype.element_ty)  # not by way of float32, which would change the bits of a NaN
    q_ptrs = q_ptr + column
    scale_ptrs = scale_ptr + (word if UE8M0 else group).to(tl.int64) * stride_sg
    rows = ()
    for route in tl.static_range(TOP_K):  # all loads before the first store, behind which they would wait in line
        rows = rows + (tl.load(src2dst_ptr + token * TOP_K + route),)
    for route in tl.static_range(TOP_K):
        row = rows[route]
        here = row >= 0
        tl.store(q_ptrs + row.to(tl.int64) * K, q, mask=(column < K) & here)
        if QUANTISED:
            place = (row // m_max).to(tl.int64) * stride_se + row % m_max if SLABS else row.to(tl.int64)
            if UE8M0:
                tl.store(scale_ptrs + place, words, mask=(word * 4 * GROUP < K) & here)
            else:
                tl.store(scale_ptrs + place, scale, mask=inside & here)


def pre_permute_contiguous(outputs, **arguments) -> None:
    """moe::pre_permute_contiguous."""
    q, _, m_indices, src2dst, ends, scratch = outputs
    _route((m_indices, ends, src2dst, scratch), len(q), False, **arguments)
    _scatter(outputs, len(q), **arguments)


def pre_permute_masked(outputs, **arguments) -> None:
    """moe::pre_permute_masked."""
    q, _, masked_m, src2dst, scratch = outputs
    m_max = q.shape[1]
    _route((masked_m, masked_m, src2dst, scratch), m_max, True, **arguments)
    _scatter(outputs, m_max, **arguments)


def _route(outputs, M, masked, *, topk_ids, num_local_experts, expert_start, **_) -> None:
    rows, ends, src2dst, scratch = outputs
    T, top_k = topk_ids.shape
    E = num_local_experts
    KP, EP = triton.next_power_of_2(top_k), triton.next_power_of_2(E)
    scanned = T * KP <= _SCANNED
    block = max(1, min((_HELD if scanned else ROUTE_CHUNK) // KP, triton.next_power_of_2(max(T, 1))))
    flags = dict(TOP_K=top_k, KP=KP, EP=EP, BLOCK_T=block) | pdl(topk_ids.device)
    ids = (topk_ids, *topk_ids.stride())
    if scanned:
        _route_kernel[(E,)](*ids, src2dst, rows, ends, T, M, E, expert_start, MASKED=masked, **flags)
        return
    chunks = triton.cdiv(T, block)
    counts, base = scratch
    _count_kernel[(chunks,)](*ids, counts, T, E, expert_start, **flags)
    _place_kernel[(chunks,)](
        *ids,
        counts,
        base,
        src2dst,
        rows,
        ends,
        T,
        M,
        E,
        expert_start,
        MASKED=masked,
        BLOCK_C=max(1, 4096 // EP),
        **flags,
    )


def _scatter_tile(T: int, K: int, group: int) -> tuple[int, int]:
    """(words of four groups, warps) of a program. Few tokens: more programs a token. 16 columns a thread either way."""
    words = max(1, min((1024 if T >= 256 else 512) // (4 * group), triton.next_power_of_2(triton.cdiv(K, 4 * group))))
    return words, max(1, words * 4 * group // 512)


def _scatter(outputs, m_max, *, hidden_states, topk_ids, recipe, scale_format, **_) -> None:
    q, scale, _, src2dst, *_ = outputs
    T, K = hidden_states.shape
    row = get_recipe("pre_permute", recipe)
    group = row.x_group or 128
    words, warps = _scatter_tile(T, K, group)
    strides = (scale.stride(0) if scale.dim() == 3 else 0, scale.stride(-1))
    _scatter_kernel[(T, triton.cdiv(K, 4 * group * words))](
        hidden_states, *hidden_states.stride(), src2dst, q, scale, *strides, K, m_max,
        TOP_K=src2dst.shape[1], GROUP=group, WORDS=words, SLABS=scale.dim() == 3, QUANTISED=row.quantised,
        UE8M0=scale_format == "ue8m0", num_warps=warps, **pdl(q.device),
    )  # fmt: skip
