"""Received tokens to expert-sorted rows: where each route's row is, in plain torch that traces and never syncs.

Row order is that of moe::pre_permute_*: by expert, then by arrival, one row per token and distinct expert. pre_permute
itself sorts and quantises raw tokens in one pass; these serve tokens that arrive quantised, or already sorted.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from moe_ops.dispatch.wire import Tokens
from moe_ops.rows import BLOCK, align


@dataclass(frozen=True)
class Routes:
    """The routes of N tokens among E local experts, numbered."""

    expert: Tensor
    """(N, top_k) int64, local expert of each route, -1 for none."""
    slot: Tensor
    """(N, top_k) int64, its row within that expert."""
    first: Tensor
    """(N, top_k) int64, the earliest route of the token to the same expert: the one that owns the row."""
    counts: Tensor
    """(E,) int64, rows of each expert."""

    @property
    def owns(self) -> Tensor:
        """(N, top_k) bool: the routes that own a row."""
        return (self.expert >= 0) & (self.first == torch.arange(self.first.shape[1], device=self.first.device))

    def in_slabs(self, m_max: int) -> Tensor:
        """src2dst (N, top_k) int32 for slabs of m_max rows."""
        return torch.where(self.expert >= 0, self.expert * m_max + self.slot, -1).int()

    def in_blocks(self) -> Tensor:
        """src2dst (N, top_k) int32 for the contiguous layout: every expert starts on a multiple of BLOCK."""
        start = starts_of(self.psum)
        return torch.where(self.expert >= 0, start[self.expert.clamp(min=0)] + self.slot, -1).int()

    @property
    def psum(self) -> Tensor:
        """(E,) int64: expert e's rows are [align(psum[e - 1]), psum[e])."""
        aligned = align(self.counts, BLOCK)
        return aligned.cumsum(0) - aligned + self.counts


def number_routes(topk_ids: Tensor, E: int, expert_start: int = 0) -> Routes:
    """Numbers the routes to experts [expert_start, expert_start + E). Other ids, -1 among them, are no route."""
    top_k = topk_ids.shape[1]
    local = topk_ids.long() - expert_start
    expert = torch.where((topk_ids >= 0) & (local >= 0) & (local < E), local, -1)
    column = torch.arange(top_k, device=topk_ids.device)
    first = torch.where(expert[:, :, None] == expert[:, None, :], column, top_k).amin(2)
    key = torch.where((expert >= 0) & (first == column), expert, E).flatten()
    counts = torch.zeros(E + 1, dtype=torch.int64, device=key.device).scatter_add(0, key, torch.ones_like(key))
    order = key.argsort(stable=True)
    place = torch.arange(key.shape[0], device=key.device) - (counts.cumsum(0) - counts)[key[order]]
    slot = torch.zeros_like(key).scatter(0, order, place).view(expert.shape).gather(1, first)
    return Routes(expert, slot, first, counts[:E])


def starts_of(psum: Tensor) -> Tensor:
    """(E,) first row of each expert, from psum."""
    return torch.cat((torch.zeros_like(psum[:1]), align(psum[:-1], BLOCK)))


def m_indices_from_psum(psum: Tensor, M) -> Tensor:
    """(M,) int32: the expert of each row, -1 for rows between a psum and the next expert's start."""
    row = torch.arange(M, device=psum.device)
    expert = torch.searchsorted(psum, row, right=True)
    last = psum.shape[0] - 1
    inside = (expert <= last) & (row >= starts_of(psum)[expert.clamp(max=last)])
    return torch.where(inside, expert, -1).int()


def scatter_tokens(tokens: Tokens, src2dst: Tensor, M) -> Tokens:
    """Tokens copied to the rows of their routes: Tokens of M rows. Rows that no route has repeat the first token."""
    return take_tokens(tokens, row_sources(src2dst, M))


def row_sources(src2dst: Tensor, M) -> Tensor:
    """(M,) int64: the token of each row; 0 where there is none."""
    top_k = src2dst.shape[1]
    token = torch.arange(src2dst.shape[0] * top_k, device=src2dst.device) // top_k
    row = torch.where(src2dst >= 0, src2dst, M).flatten().long()  # row M collects those that have none
    return torch.zeros(M + 1, dtype=torch.int64, device=row.device).scatter(0, row, token)[:M]


def take_tokens(tokens: Tokens, index: Tensor) -> Tokens:
    """The tokens at `index`, of any shape: (*index.shape, K)."""
    scale = None if tokens.scale is None else _take(tokens.scale, index)
    return Tokens(_take(tokens.x, index), scale)


def _take(x: Tensor, index: Tensor) -> Tensor:
    """x[index]; torch cannot index fp8 on a CPU."""
    values = x.view(torch.uint8) if x.dtype.itemsize == 1 else x
    return values[index].view(x.dtype)


def expand_to_slab(rows: Tokens, psum: Tensor, m_max: int) -> tuple[Tokens, Tensor]:
    """Expanded rows (M, K) to slabs (E, m_max, K); masked_m (E,) int32. Rows past masked_m[e] repeat others."""
    start = starts_of(psum)
    index = start[:, None] + torch.arange(m_max, device=psum.device)
    return take_tokens(rows, index.clamp(max=rows.x.shape[0] - 1)), (psum - start).int()


def slab_to_expand(slab: Tensor, psum: Tensor, M) -> Tensor:
    """Slabs (E, m_max, K) back to expanded rows (M, K), 0 where there is none."""
    expert = m_indices_from_psum(psum, M).long()
    slot = torch.arange(M, device=psum.device) - starts_of(psum)[expert.clamp(min=0)]
    src2dst = torch.where(expert >= 0, expert * slab.shape[1] + slot, -1).int()
    return torch.ops.moe.post_permute(slab, src2dst[:, None])


def weigh(rows: Tensor, weights: Tensor) -> Tensor:
    """(M, K) rows times (M,) weights: float32, rounded once. Weights of rows that nobody has are not looked at."""
    return (rows.float() * weights.float()[:, None]).to(rows.dtype)
