"""Stands in for the deep_ep library (sgl-deep-ep 0.1.2) where there is no card: names, shapes, dtypes, alignment and
capacity rules of the calls that this package makes, on torch.distributed's object collectives. Slow, and synchronous.

`Buffer` holds the low-latency and the normal calls, `ElasticBuffer` those of DeepEP V2. Options that only tune
(configs, SM and queue counts, events, hooks) are left out. Rows that nobody sent are NaN, as memory may be. The library
is built for some hidden sizes only; here, any that its kernels' vectors divide.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

topk_idx_t = torch.int64
FINISHED_SUM_TAG = 1024
"""A low-latency counter starts there: no rank may send as many tokens as that to one expert."""

Values = Tensor | tuple[Tensor, Tensor]


def _need(ok: bool, rule: str, got: object) -> None:
    if not ok:
        raise AssertionError(f"deep_ep: {rule}; got {got}")


def _align(n: int, to: int) -> int:
    return -(-n // to) * to


def _check_routes(x: Tensor, topk_idx: Tensor, topk_weights: Tensor | None, num_experts: int, ranks: int) -> None:
    _need(x.dim() == 2 and x.is_contiguous(), "x is (num_tokens, hidden), contiguous", (x.shape, x.stride()))
    _need(x.shape[1] * x.element_size() % 16 == 0, "a row of x is whole 16-byte vectors", x.shape[1])
    _need(topk_idx.dtype == topk_idx_t and topk_idx.is_contiguous(), "topk_idx is int64, contiguous", topk_idx.dtype)
    _need(topk_idx.dim() == 2 and len(topk_idx) == len(x), "topk_idx has a row for each of x", topk_idx.shape)
    _need(num_experts % ranks == 0, "num_experts is a multiple of the ranks", num_experts)
    if topk_weights is not None:
        _need(topk_weights.dtype == torch.float32, "topk_weights is float32", topk_weights.dtype)
        _need(topk_weights.shape == topk_idx.shape, "topk_weights has topk_idx's shape", topk_weights.shape)


class _Ranks:
    def __init__(self, group: dist.ProcessGroup):
        self.group, self.rank, self.size = group, dist.get_rank(group), dist.get_world_size(group)

    def share(self, mine: Any) -> list[Any]:
        """What every rank of the group has."""
        everyone: list[Any] = [None] * self.size
        dist.all_gather_object(everyone, mine, self.group)
        return everyone


class Buffer:
    """The low-latency and the normal calls."""

    def __init__(
        self, group: dist.ProcessGroup, num_nvl_bytes: int = 0, num_rdma_bytes: int = 0, low_latency_mode: bool = False
    ):
        self.group, self._ranks, self.low_latency_mode = group, _Ranks(group), low_latency_mode

    def low_latency_dispatch(
        self,
        x: Tensor,
        topk_idx: Tensor,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int,
        use_fp8: bool = True,
        round_scale: bool = False,
        use_ue8m0: bool = False,
    ) -> tuple[Values, Tensor, tuple, None, None]:
        """(recv_x (E, ranks * max, hidden) bf16, or e4m3 with scales; recv_count (E,) int32; handle; event; hook).

        Scales are one a row and 128 columns, column-major: (E, M, hidden / 128) float32, or with use_ue8m0
        (E, M, hidden / 512) int32.
        """
        size, hidden, most = self._ranks.size, x.shape[1], num_max_dispatch_tokens_per_rank
        _need(self.low_latency_mode, "the buffer is in low-latency mode", False)
        _need(x.dtype == torch.bfloat16, "x is bfloat16", x.dtype)
        _check_routes(x, topk_idx, None, num_experts, size)
        _need(len(x) <= most <= FINISHED_SUM_TAG, f"num_tokens <= max <= {FINISHED_SUM_TAG}", (len(x), most))
        _need(hidden % (512 if use_ue8m0 else 128) == 0, "hidden fills whole scales", hidden)
        _need(round_scale or not use_ue8m0, "use_ue8m0 goes with round_scale", round_scale)
        E, M = num_experts // size, size * most
        recv = torch.full((E, M, hidden), float("nan"), dtype=torch.bfloat16)
        count, source = torch.zeros(E, dtype=torch.int32), torch.full((E, M, 2), -1)
        for rank, (tokens, ids) in enumerate(self._ranks.share((x, topk_idx))):
            for token, column in (ids // E == self._ranks.rank).logical_and(ids >= 0).nonzero().tolist():
                expert = int(ids[token, column]) % E
                recv[expert, count[expert]] = tokens[token]
                source[expert, count[expert]] = torch.tensor((rank, token * ids.shape[1] + column))
                count[expert] += 1
        handle = (source, count, most, hidden, num_experts)
        return (_cast(recv, round_scale, use_ue8m0) if use_fp8 else recv), count, handle, None, None

    def low_latency_combine(
        self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor, handle: tuple
    ) -> tuple[Tensor, None, None]:
        """(num_tokens, hidden) bf16: the sum of topk_weights * the routes' rows, in float32, rounded once."""
        source, count, most, hidden, num_experts = handle
        E = num_experts // self._ranks.size
        want = (E, self._ranks.size * most, hidden)
        _need(x.shape == want and x.dtype == torch.bfloat16, f"x is {want} bfloat16", (x.shape, x.dtype))
        _need(x.is_contiguous(), "x is contiguous", x.stride())
        _need(topk_idx.dtype == topk_idx_t and topk_weights.dtype == torch.float32, "int64 and float32", topk_idx.dtype)
        rows = torch.zeros(*topk_idx.shape, hidden)
        for rows_of, source_of, count_of in self._ranks.share((x, source, count)):
            for expert, valid in enumerate(count_of.tolist()):
                for slot in range(valid):
                    rank, route = source_of[expert, slot].tolist()
                    if rank == self._ranks.rank:
                        rows.view(-1, hidden)[route] = rows_of[expert, slot].float()
        return _ordered_sum(rows, topk_weights).to(torch.bfloat16), None, None

    def get_dispatch_layout(self, topk_idx: Tensor, num_experts: int) -> tuple[Tensor, None, Tensor, Tensor, None]:
        """(num_tokens_per_rank, None within a node, num_tokens_per_expert, is_token_in_rank (T, ranks), event)."""
        E = num_experts // self._ranks.size
        owner = torch.where(topk_idx >= 0, topk_idx // E, -1)
        there = torch.stack([(owner == rank).any(1) for rank in range(self._ranks.size)], 1)
        per_expert = torch.bincount(topk_idx[topk_idx >= 0], minlength=num_experts).int()
        return there.sum(0).int(), None, per_expert, there, None

    def dispatch(
        self,
        x: Values,
        *,
        num_tokens_per_rank: Tensor,
        num_tokens_per_rdma_rank: Tensor | None = None,
        is_token_in_rank: Tensor,
        num_tokens_per_expert: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor,
        expert_alignment: int = 1,
    ) -> tuple[Values, Tensor, Tensor, list[int], Any, None]:
        """(recv_x, recv_topk_idx local or -1, recv_topk_weights, rows per expert aligned (host list), handle, event)"""
        values, scales = x if isinstance(x, tuple) else (x, None)
        if scales is not None:
            want = (len(values), values.shape[1] // 128)
            _need(scales.shape == want and scales.dtype == torch.float32, f"scales are {want} float32", scales.shape)
            _need(values.dtype == torch.float8_e4m3fn, "values beside scales are e4m3", values.dtype)
        got = _arrivals(self._ranks, values, scales, topk_idx, topk_weights, len(num_tokens_per_expert))
        rows = [_align(int((got.ids == e).any(1).sum()), expert_alignment) for e in range(got.E)]
        return got.received, got.ids, got.weights, rows, (got.source, len(values)), None

    def combine(self, x: Tensor, handle: Any) -> tuple[Tensor, None, None]:
        """(num_tokens, hidden) bf16: the sum over the ranks, without weights."""
        return _combine(self._ranks, x, handle), None, None


@dataclass(frozen=True)
class EPHandle:
    """What ElasticBuffer.combine and its callers read."""

    psum_num_recv_tokens_per_expert: Tensor
    num_recv_tokens_per_expert_list: list[int]
    do_expand: bool
    source: Any


class ElasticBuffer:
    """The calls of DeepEP V2."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        *,
        num_max_tokens_per_rank: int,
        hidden: int,
        num_topk: int,
        use_fp8_dispatch: bool = False,
    ):
        self.group, self._ranks, self.num_max_tokens_per_rank = group, _Ranks(group), num_max_tokens_per_rank

    def dispatch(
        self,
        x: Values,
        topk_idx: Tensor,
        topk_weights: Tensor,
        *,
        num_experts: int,
        num_max_tokens_per_rank: int | None = None,
        expert_alignment: int = 1,
        do_cpu_sync: bool = True,
        do_expand: bool = False,
    ) -> tuple[Values, Tensor, Tensor, EPHandle, None]:
        """(recv_x, recv_topk_idx, recv_topk_weights, handle, event).

        Expanded: a row for each token and expert, those of expert e in [align(psum[e - 1]), psum[e]), and a weight a
        row; without do_cpu_sync, the worst case of rows.
        """
        values, scales = x if isinstance(x, tuple) else (x, None)
        most = num_max_tokens_per_rank or self.num_max_tokens_per_rank
        _need(len(values) <= most, "num_tokens <= num_max_tokens_per_rank", (len(values), most))
        got = _arrivals(self._ranks, values, scales, topk_idx, topk_weights, num_experts)
        counts = [int((got.ids == e).any(1).sum()) for e in range(got.E)]
        if not do_expand:
            aligned = [_align(n, expert_alignment) for n in counts]
            handle = EPHandle(torch.tensor(aligned).cumsum(0).int(), aligned, False, (got.source, len(values)))
            return got.received, got.ids, got.weights, handle, None
        psum, route, start = [], [], 0
        for expert, n in enumerate(counts):
            places = (got.ids == expert).nonzero().tolist()
            route += [(start + slot, token, column) for slot, (token, column) in enumerate(places)]
            psum.append(start + n)
            start = _align(start + n, expert_alignment)
        worst = self._ranks.size * most * min(topk_idx.shape[1], got.E) + got.E * (expert_alignment - 1)
        M = start if do_cpu_sync else _align(worst, expert_alignment)
        row, token, column = torch.tensor(route, dtype=torch.int64).reshape(-1, 3).unbind(1)
        spread = [torch.full((M, t.shape[1]), 0xFF, dtype=torch.uint8) for t in (got.value_bytes, got.scale_bytes)]
        for out, given in zip(spread, (got.value_bytes, got.scale_bytes), strict=True):
            out[row] = given[token]
        weights = torch.full((M,), float("nan"))
        weights[row] = got.weights[token, column]
        rows = spread[0].view(values.dtype)
        received = rows if scales is None else (rows, spread[1].view(scales.dtype))
        source = [(int(r), *got.source[int(t)]) for r, t in zip(row, token, strict=True)]
        return received, got.ids, weights, EPHandle(torch.tensor(psum).int(), counts, True, (source, len(values))), None

    def combine(self, x: Tensor, handle: EPHandle) -> tuple[Tensor, None, None]:
        """(num_tokens, hidden) bf16: the sum over the ranks, or over the expanded rows, without weights."""
        return _combine(self._ranks, x, handle.source), None, None


@dataclass(frozen=True)
class _Arrivals:
    values: Tensor
    scales: Tensor | None
    ids: Tensor
    weights: Tensor
    source: list[tuple[int, int]]
    E: int

    @property
    def received(self) -> Values:
        return self.values if self.scales is None else (self.values, self.scales)

    @property
    def value_bytes(self) -> Tensor:
        return self.values.contiguous().view(torch.uint8)

    @property
    def scale_bytes(self) -> Tensor:
        empty = torch.zeros(len(self.values), 0, dtype=torch.uint8)
        return empty if self.scales is None else self.scales.view(torch.uint8)


def _arrivals(ranks: _Ranks, x: Tensor, scales: Tensor | None, ids: Tensor, weights: Tensor, num_experts: int):
    """The tokens with an expert on this rank, by rank and then by token; once each."""
    _check_routes(x, ids, weights, num_experts, ranks.size)
    E, source = num_experts // ranks.size, []
    parts: dict[str, list[Tensor]] = {"x": [], "scales": [], "ids": [], "weights": []}
    for rank, sent in enumerate(ranks.share((_bytes(x), _bytes(scales), ids, weights))):
        here = (sent[2] // E == ranks.rank) & (sent[2] >= 0)
        local = torch.where(here, sent[2] - ranks.rank * E, -1)
        token = here.any(1).nonzero().flatten()
        for part, given in zip(parts.values(), (sent[0], sent[1], local, sent[3] * here), strict=True):
            if given is not None:
                part.append(given[token])
        source += [(rank, int(t)) for t in token]
    received = None if scales is None else torch.cat(parts["scales"]).view(scales.dtype)
    values = torch.cat(parts["x"]).view(x.dtype)
    return _Arrivals(values, received, torch.cat(parts["ids"]), torch.cat(parts["weights"]), source, E)


def _bytes(x: Tensor | None) -> Tensor | None:
    """Pickle knows no fp8."""
    return None if x is None else x.contiguous().view(torch.uint8)


def _combine(ranks: _Ranks, x: Tensor, handle: Any) -> Tensor:
    """Rows to their tokens, added in float32 by rank and then by row, rounded once."""
    _need(x.dim() == 2 and x.dtype == torch.bfloat16, "x is 2-D bfloat16", (x.shape, x.dtype))
    source, T = handle
    out = torch.zeros(T, x.shape[1])
    for rows, origins in ranks.share((x, source)):
        for index, origin in enumerate(origins):
            row, rank, token = origin if len(origin) == 3 else (index, *origin)
            if rank == ranks.rank:
                out[token] += rows[row].float()
    return out.to(torch.bfloat16)


def _ordered_sum(rows: Tensor, weights: Tensor) -> Tensor:
    out = torch.zeros(rows.shape[0], rows.shape[2])
    for column in range(rows.shape[1]):
        out += rows[:, column] * weights[:, column, None]
    return out


def _cast(x: Tensor, round_scale: bool, use_ue8m0: bool) -> tuple[Tensor, Tensor]:
    """e4m3 and scales by 128 columns; amax counts as 1e-4 at least."""
    groups = x.float().unflatten(-1, (-1, 128))
    scale = groups.abs().amax(-1).clamp(min=1e-4) / 448.0
    scale = torch.exp2(torch.log2(scale).ceil()) if round_scale else scale
    q = (groups / scale[..., None]).clamp(-448.0, 448.0).flatten(-2).to(torch.float8_e4m3fn)
    if use_ue8m0:
        byte = (scale.nan_to_num(1.0).view(torch.int32) >> 23).to(torch.uint8)
        scale = byte.contiguous().view(torch.int32)
    return q, scale.transpose(-1, -2).contiguous().transpose(-1, -2)
