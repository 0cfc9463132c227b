"""TorchTransport: the forms of transport.py on the collectives of torch.distributed.

Without host counts, collectives move fixed shapes. So each rank sends every rank its max_tokens slots whole, which is
an all-gather, and the receiver takes out what is its own: no routing can overflow. The way back is an all-to-all with
equal splits. With host counts, a token goes once to each rank that has an expert for it, and nowhere else.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moe_ops.dispatch.collectives import Collectives
from moe_ops.dispatch.experts import pack_rows
from moe_ops.dispatch.scatter import Routes, number_routes, row_sources, scatter_tokens, take_tokens
from moe_ops.dispatch.setup import ExpertSetup
from moe_ops.dispatch.transport import Batch, Counted, Expanded, Slabs, Slots
from moe_ops.dispatch.wire import Wire, as_bytes, from_bytes
from moe_ops.rows import BLOCK, align, contiguous_rows


@dataclass(frozen=True)
class Home:
    """How sums find home: rows of what comes back for each of this rank's tokens."""

    src2dst: Tensor
    """(T, parts) int32, -1 for none."""
    dtype: torch.dtype
    away: Tensor | None = None
    """(N, top_k) int32, on the experts' rank: the row of each received route."""
    splits: tuple[list[int], list[int]] | None = None
    """Rows that this rank gave each rank, and got from each."""


class TorchTransport:
    """Carries every form, on any device that the group's backend serves. No limit on max_tokens.

    Args:
        group: the expert-parallel ranks. None: all ranks of the job.
    """

    def __init__(self, group: dist.ProcessGroup | None = None):
        self.collectives = Collectives(group)
        self.rank = self.collectives.rank
        self.size = self.collectives.size

    def check(self, op: str, setup: ExpertSetup) -> None:
        """Every size fits."""

    def send_slots(self, batch: Batch, setup: ExpertSetup) -> Slots:
        packet, weights, ids = self._gather(batch, as_bytes(batch.hidden_states.to(torch.bfloat16)), setup)
        hidden_states = from_bytes(packet, torch.bfloat16)
        here = setup.local_experts(self.rank, self.size)
        ids = torch.where((ids >= here.start) & (ids < here.stop), ids, -1)
        owner = self._owner(batch.topk_ids, setup)
        visits = (owner[:, :, None] == torch.arange(self.size, device=owner.device)).any(1)
        return Slots(hidden_states, weights, ids, Home(self._where(visits, setup), batch.dtype))

    def return_slots(self, sums: Tensor, handle: Home) -> Tensor:
        back = self.collectives.all_to_all(sums.unflatten(0, (self.size, -1)))
        return _add_up(back.flatten(0, 1), handle)

    def send_slabs(self, batch: Batch, setup: ExpertSetup, wire: Wire) -> Slabs:
        packet, _, ids = self._gather(batch, wire.encode(batch.hidden_states), setup)
        routes = self._routes(ids, setup)
        m_max = align(ids.shape[0], BLOCK)
        src2dst = routes.in_slabs(m_max)
        E = routes.counts.shape[0]
        source = row_sources(src2dst, E * m_max).view(E, m_max)
        x, x_scale = pack_rows(take_tokens(wire.decode(packet), source))
        handle = Home(self._route_rows(batch.topk_ids, setup), batch.dtype, away=src2dst)
        return Slabs(x, x_scale, routes.counts.int(), handle)

    def return_slabs(self, down: Tensor, batch: Batch, setup: ExpertSetup, handle: Home) -> Tensor:
        back = self._routes_home(down, handle)
        return _add_up(back, handle, setup.routed_scaling_factor, batch.topk_weights)

    def send_expanded(self, batch: Batch, setup: ExpertSetup, wire: Wire) -> Expanded:
        packet, weights, ids = self._gather(batch, wire.encode(batch.hidden_states), setup)
        routes = self._routes(ids, setup)
        src2dst = torch.where(routes.owns, routes.in_blocks(), -1)
        M: Any = contiguous_rows(ids.shape[0], setup.top_k, routes.counts.shape[0])
        tokens = scatter_tokens(wire.decode(packet), src2dst, M)
        row = torch.where(src2dst >= 0, src2dst, M).flatten().long()
        route_weights = weights.new_zeros((M + 1,)).scatter(0, row, _weight_of_rows(weights, routes).flatten())[:M]
        handle = Home(self._route_rows(batch.topk_ids, setup), batch.dtype, away=src2dst)
        return Expanded(tokens, routes.psum, route_weights, handle)

    def return_expanded(self, rows: Tensor, setup: ExpertSetup, handle: Home) -> Tensor:
        return _add_up(self._routes_home(rows, handle), handle, setup.routed_scaling_factor)

    def send_counted(self, batch: Batch, setup: ExpertSetup, wire: Wire) -> Counted:
        owner = self._owner(batch.topk_ids, setup)
        visits = (owner == torch.arange(self.size, device=owner.device)[:, None, None]).any(2)  # (size, T)
        send = visits.sum(1)
        receive = self.collectives.all_to_all(send[:, None]).flatten()
        splits = send.tolist(), receive.tolist()
        token = visits.nonzero()[:, 1]
        values = wire.encode(batch.hidden_states)
        packet = _with_routes(values, batch.topk_weights.float(), batch.topk_ids.int())[token]
        packet, weights, ids = _without_routes(self.collectives.all_to_all_v(packet, *splits), setup)
        here = setup.local_experts(self.rank, self.size)
        local = torch.where((ids >= here.start) & (ids < here.stop), ids - here.start, -1)
        rows = align(number_routes(local, len(here)).counts, BLOCK).tolist()
        place = visits.flatten().cumsum(0).view_as(visits) - 1
        src2dst = _few(torch.where(visits, place, -1).T, setup.top_k)
        return Counted(wire.decode(packet), weights, local, rows, Home(src2dst, batch.dtype, splits=splits))

    def return_counted(self, sums: Tensor, setup: ExpertSetup, handle: Home) -> Tensor:
        assert handle.splits is not None
        gave, got = handle.splits
        return _add_up(self.collectives.all_to_all_v(sums, got, gave), handle, setup.routed_scaling_factor)

    def _gather(self, batch: Batch, values: Tensor, setup: ExpertSetup) -> tuple[Tensor, Tensor, Tensor]:
        """Every rank's slots: (bytes (N, ...) of `values`, topk_weights (N, top_k) fp32, topk_ids (N, top_k) int32)."""
        assert setup.max_tokens is not None
        C = setup.max_tokens
        ids, weights = filled(batch.topk_ids.int(), C, -1), filled(batch.topk_weights.float(), C)
        packet = _with_routes(filled(values, C), weights, ids)
        return _without_routes(self.collectives.all_gather(packet), setup)

    def _routes(self, ids: Tensor, setup: ExpertSetup) -> Routes:
        here = setup.local_experts(self.rank, self.size)
        return number_routes(ids, len(here), here.start)

    def _owner(self, topk_ids: Tensor, setup: ExpertSetup) -> Tensor:
        """The rank of each route's expert, -1 for none."""
        valid = (topk_ids >= 0) & (topk_ids < setup.num_experts)
        return torch.where(valid, topk_ids // (setup.num_experts // self.size), -1)

    def _where(self, visits: Tensor, setup: ExpertSetup) -> Tensor:
        """(T, at most top_k) int32: where token t's slots of the ranks that it goes to lie in what comes back."""
        assert setup.max_tokens is not None
        rank = torch.arange(self.size, device=visits.device)
        token = torch.arange(visits.shape[0], device=visits.device)
        return _few(torch.where(visits, rank * setup.max_tokens + token[:, None], -1), setup.top_k)

    def _route_rows(self, topk_ids: Tensor, setup: ExpertSetup) -> Tensor:
        """(T, top_k) int32: where each route's row lies in what comes back, (size, max_tokens, top_k) flat."""
        assert setup.max_tokens is not None
        owner = self._owner(topk_ids, setup)
        token = torch.arange(topk_ids.shape[0], device=topk_ids.device)[:, None]
        column = torch.arange(setup.top_k, device=topk_ids.device)
        row = (owner * setup.max_tokens + token) * setup.top_k + column
        return torch.where(owner >= 0, row, -1).int()

    def _routes_home(self, rows: Tensor, handle: Home) -> Tensor:
        """Each received route's row to the rank that the token came from: (size * max_tokens * top_k, K)."""
        assert handle.away is not None
        routewise = torch.ops.moe.post_permute(rows, handle.away, mode="routewise")
        return self.collectives.all_to_all(routewise.unflatten(0, (self.size, -1))).flatten(0, 2)


def _add_up(rows: Tensor, home: Home, scaling: float = 1.0, weights: Tensor | None = None) -> Tensor:
    return torch.ops.moe.post_permute(rows, home.src2dst, weights, routed_scaling_factor=scaling, dtype=home.dtype)


def _few(rows: Tensor, columns: int) -> Tensor:
    """(T, ranks) rows, -1 for none, to (T, at most `columns`) int32: a token goes to no more ranks than it has routes,
    and what adds up looks at every column. Rows ascend with the rank, so the order of the sum stays."""
    if rows.shape[1] > columns:
        end = torch.iinfo(rows.dtype).max
        rows = torch.where(rows >= 0, rows, end).sort(1).values[:, :columns]
        rows = torch.where(rows < end, rows, -1)
    return rows.int().contiguous()


def _weight_of_rows(weights: Tensor, routes: Routes) -> Tensor:
    """(N, top_k): the weight of the row that a route owns: all routes of the token to that expert together."""
    column = torch.arange(weights.shape[1], device=weights.device)
    mine = routes.first[:, None, :] == column[:, None]
    return torch.where(mine, weights[:, None, :], 0.0).sum(2)


def filled(x: Tensor, rows: int, value: int = 0) -> Tensor:
    """(T, n) -> (rows, n). Padding by rows - T would make the compiler a graph of its own for a full batch."""
    return x.new_full((rows, x.shape[1]), value).slice_scatter(x, 0, 0, x.shape[0])


def _with_routes(values: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    """Rows of bytes: the values, ids (int32), weights (float32)."""
    return torch.cat((values, as_bytes(ids), as_bytes(weights)), 1)


def _without_routes(packet: Tensor, setup: ExpertSetup) -> tuple[Tensor, Tensor, Tensor]:
    """(rows, topk_weights, topk_ids): undoes _with_routes."""
    width = 4 * setup.top_k
    rows, ids, weights = packet.split((packet.shape[1] - 2 * width, width, width), 1)
    return rows, from_bytes(weights, torch.float32), from_bytes(ids, torch.int32)
