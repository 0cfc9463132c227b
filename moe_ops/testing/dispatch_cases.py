"""Dispatch-sized inputs: a DispatchCase builds every rank's tokens from one seed, runs a rank, and says what one
process without dispatch computes."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache

import torch
import torch.distributed as dist
from torch import Tensor

from moe_ops import dispatch
from moe_ops.csrc_stubs import deep_ep, mooncake_ep, nixl_ep
from moe_ops.dispatch import (
    DeepEPTransport,
    Dispatcher,
    Experts,
    ExpertSetup,
    MooncakeTransport,
    NixlTransport,
    TorchTransport,
    Transport,
)
from moe_ops.parallel.weights import split_experts
from moe_ops.prep import MoEWeights
from moe_ops.recipes import get_recipe
from moe_ops.testing.cases import LayerCase
from moe_ops.testing.decode import decode_rows


@lru_cache(maxsize=8)
def built(layer: LayerCase) -> tuple[tuple[Tensor, Tensor, Tensor], MoEWeights]:
    """layer.build(), made once for the cases in a row that share it."""
    return layer.build()


@dataclass(frozen=True)
class DispatchCase:
    """`tokens[r]` tokens on rank r, E experts over all ranks. `str(case)` reads aloud."""

    format: str
    recipe: str
    tokens: tuple[int, ...]
    scale_format: str | None = None
    payload: str = "auto"
    distribution: str = "uniform"
    E: int = 8
    K: int = 256
    I: int = 128
    top_k: int = 3
    max_tokens: int = 8
    scaling: float = 2.5
    bias: bool = False
    layout: str = "auto"
    dtype: torch.dtype = torch.bfloat16
    seed: int = 0
    buffer: str | None = None
    """A library's stand-in as transport: deep_ep's buffer or elastic, mooncake, nixl. None: TorchTransport."""
    attributes: dict = field(default_factory=dict, hash=False)

    def __str__(self) -> str:
        parts = [self.format, self.recipe, self.scale_format, "T" + "_".join(map(str, self.tokens)), self.distribution]
        parts += [self.buffer, None if self.payload == "auto" else self.payload, "bias" if self.bias else None]
        return "-".join(part for part in parts if part)

    @property
    def ranks(self) -> int:
        return len(self.tokens)

    @property
    def layer(self) -> LayerCase:
        """The same layer on one rank."""
        return LayerCase(
            self.recipe,
            self.scale_format,
            T=sum(self.tokens),
            E=self.E,
            K=self.K,
            I=self.I,
            top_k=self.top_k,
            distribution=self.distribution,
            bias=self.bias,
            dtype=self.dtype,
            seed=self.seed,
            attributes=self.attributes,
        )

    def build(self) -> tuple[tuple[Tensor, Tensor, Tensor], MoEWeights]:
        """((hidden_states, topk_weights, topk_ids) of all ranks in turn, all experts)."""
        return built(self.layer)

    def own(self, inputs: tuple[Tensor, ...], rank: int) -> tuple[Tensor, ...]:
        """One rank's part of the inputs, or of a result."""
        return tuple(t.split(self.tokens)[rank] for t in inputs)

    def dispatcher(self, weights: MoEWeights, group: dist.ProcessGroup, **more) -> Dispatcher:
        """This rank's end; `weights` are its own experts."""
        transport = TorchTransport(group) if self.buffer is None else self._library(group)
        setup = ExpertSetup.of(
            weights,
            ranks=self.ranks,
            top_k=self.top_k,
            max_tokens=self.max_tokens,
            payload=self.payload,
            routed_scaling_factor=self.scaling,
        )
        return dispatch.create(self.format, setup, transport, layout=self.layout, **more)

    def _library(self, group: dist.ProcessGroup) -> Transport:
        if self.buffer == "mooncake":
            return MooncakeTransport(mooncake_ep.Buffer(group))
        if self.buffer == "nixl":
            nixl = nixl_ep.Buffer(dist.get_rank(group), group)
            nixl.update_memory_buffers(self.ranks, self.E // self.ranks)
            nixl.connect_ranks(list(range(self.ranks)))
            return NixlTransport(nixl)
        if self.buffer == "elastic":
            elastic = deep_ep.ElasticBuffer(
                group, num_max_tokens_per_rank=self.max_tokens, hidden=self.K, num_topk=self.top_k
            )
            return DeepEPTransport(group, elastic=elastic)
        return DeepEPTransport(group, buffer=deep_ep.Buffer(group, low_latency_mode=True))

    def run(self, group: dist.ProcessGroup, *, stages: bool = False) -> Tensor:
        """What this rank returns for its tokens; for formats that leave the reduction to the tail, its part of the sum
        for all tokens. stages: one by one, also where moe::fused_deepgemm could take their place."""
        rank = dist.get_rank(group)
        inputs, weights = self.build()
        experts = Experts(split_experts(weights, rank, self.ranks), **self.attributes)
        here = self.dispatcher(experts.weights, group)
        batch = self.own(inputs, rank) if here.reduces else inputs
        if not stages:
            return dispatch.run(here, experts, *batch)
        state = here.dispatch(*batch)
        return here.combine(dispatch.run_stages(here, experts, state), state)

    def routewise(self) -> Tensor:
        """(T, top_k, K) bf16: GEMM2's row of every route, computed in one process; 0 where there is none."""
        (x, _, ids), weights = self.build()
        form = dict(recipe=weights.recipe, scale_format=weights.scale_format)
        sort = torch.ops.moe.pre_permute_contiguous
        x_q, x_scale, m_indices, src2dst = sort(x, ids, num_local_experts=self.E, **form)[:4]
        down = Experts(weights, **self.attributes)(dispatch.ExpertRows(x_q, x_scale, m_indices=m_indices))
        return torch.ops.moe.post_permute(down, src2dst, mode="routewise")

    def expected(self, form: type[Dispatcher], rank_of_sum: int | None = None) -> Tensor:
        """(T, K): the sum over routes with the roundings that the format declares, and no others.

        rank_of_sum: only the part of one rank's experts, for formats that leave the reduction to the tail.
        """
        (x, weights, ids), prepared = self.build()
        ids, each = ids.long(), self.E // self.ranks
        there = (ids >= 0) & (ids < self.E)
        rows = self.routewise().float()
        if prepared.w2_bias is not None:
            rows = rows + torch.where(there[..., None], prepared.w2_bias[ids.clamp(0, self.E - 1)], 0.0)
        out = torch.zeros(len(x), self.K)
        early, late = (self.scaling, 1.0) if form.scaled_in == "post_permute" else (1.0, self.scaling)
        if form.sums == "partial sums":
            for rank in range(self.ranks) if rank_of_sum is None else [rank_of_sum]:
                part = torch.zeros_like(out)
                for j in range(self.top_k):
                    here = there[:, j] & (ids[:, j] // each == rank)
                    part += torch.where(here[:, None], rows[:, j] * weights[:, j, None], 0.0)
                out += (part * early).to(torch.bfloat16)
            return (out * late).to(x.dtype)
        rows = rows.to(torch.bfloat16).float()
        for j in range(self.top_k):
            weight = torch.where(there[:, j], weights[:, j], 0.0)
            if form.sums == "rows":
                out += rows[:, j] * weight[:, None]
                continue
            same = there & (ids == ids[:, j, None])  # a token has one row for all its routes to one expert
            first = same.int().argmax(1) == j
            weight = torch.where(first, (same * weights).sum(1), 0.0)
            out += (rows[:, j] * weight[:, None]).to(torch.bfloat16)
        return (out * late).to(x.dtype)


def run_case(group: dist.ProcessGroup, case: DispatchCase, **more) -> Tensor:
    """For RankPool.run: one rank of a case."""
    return case.run(group, **more)


def run_overlapped(group: dist.ProcessGroup, case: DispatchCase, parts: int) -> tuple[Tensor, Tensor]:
    """For RankPool.run: one rank's result of the parts one by one, and overlapped."""
    rank = dist.get_rank(group)
    inputs, weights = case.build()
    experts = Experts(split_experts(weights, rank, case.ranks), **case.attributes)
    overlap = dispatch.Overlap(parts)
    part = replace(case, max_tokens=overlap.capacity(case.max_tokens)).dispatcher(experts.weights, group)
    batch = case.own(inputs, rank)
    each = -(-len(batch[0]) // parts)
    pieces = [[t[i * each : (i + 1) * each] for t in batch] for i in range(parts)]
    return torch.cat([dispatch.run(part, experts, *piece) for piece in pieces]), dispatch.run(
        part, experts, *batch, overlap=overlap
    )


def run_counted(group: dist.ProcessGroup, case: DispatchCase) -> int:
    """For RankPool.run: the rows that one rank's experts are given."""
    rank = dist.get_rank(group)
    inputs, weights = case.build()
    here = case.dispatcher(split_experts(weights, rank, case.ranks), group)
    rows = here.pre_permute(here.dispatch(*(case.own(inputs, rank) if here.reduces else inputs)))
    if rows.masked_m is not None:
        return int(rows.masked_m.sum())
    assert rows.m_indices is not None
    return int((rows.m_indices >= 0).sum())


def run_coded(group: dist.ProcessGroup, case: DispatchCase, hidden_states: Tensor, topk_weights: Tensor) -> Tensor:
    """One rank of a case whose expert e answers a row with its first value in column e, 0 elsewhere: the result shows
    which routes came back, how often, and with which weight."""

    def experts(rows: dispatch.ExpertRows, here: Dispatcher) -> Tensor:
        E = len(here.local_experts)
        first = decode_rows(rows.x, rows.x_scale, get_recipe("coded", case.recipe))[..., :1]
        expert = torch.arange(E)[:, None].expand(rows.x.shape[:-1]) if rows.m_indices is None else rows.m_indices
        out = torch.zeros(*rows.x.shape, dtype=torch.bfloat16)
        column = (expert.long() + here.local_experts.start).clamp(min=0)
        return out.scatter(-1, column[..., None], first.to(torch.bfloat16))

    return _run_with(group, case, hidden_states, topk_weights, experts)


def run_identity(group: dist.ProcessGroup, case: DispatchCase, hidden_states: Tensor, topk_weights: Tensor) -> Tensor:
    """One rank of a case whose experts return the rows that they read, dequantised to bf16."""

    def experts(rows: dispatch.ExpertRows, here: Dispatcher) -> Tensor:
        return decode_rows(rows.x, rows.x_scale, get_recipe("identity", case.recipe)).to(torch.bfloat16)

    return _run_with(group, case, hidden_states, topk_weights, experts)


def _run_with(group: dist.ProcessGroup, case: DispatchCase, x: Tensor, w: Tensor, experts: Callable) -> Tensor:
    rank = dist.get_rank(group)
    (_, _, ids), weights = case.build()
    here = case.dispatcher(split_experts(weights, rank, case.ranks), group)
    state = here.dispatch(*(case.own((x, w, ids), rank) if here.reduces else (x, w, ids)))
    rows = here.pre_permute(state)
    return here.combine(here.post_permute(experts(rows, here), rows, state), state)


class _Layer(torch.nn.Module):
    """A module, because Dynamo takes the ints that it reaches from one for constants, and from elsewhere for sizes."""

    def __init__(self, dispatcher: Dispatcher, experts: Experts):
        super().__init__()
        self.dispatcher, self.experts = dispatcher, experts

    def forward(self, *batch: Tensor) -> Tensor:
        return dispatch.run(self.dispatcher, self.experts, *batch)


def run_compiled(group: dist.ProcessGroup, case: DispatchCase, backend: str) -> tuple[int, list[bool]]:
    """(compiled variants, whether each call has eager's bits): this rank's tokens, then fewer and fewer of them."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    rank = dist.get_rank(group)
    inputs, weights = case.build()
    experts = Experts(split_experts(weights, rank, case.ranks), **case.attributes)
    here = case.dispatcher(experts.weights, group, captured=True)
    layer = torch.compile(_Layer(here, experts), fullgraph=True, dynamic=True, backend=backend)
    same = []
    for drop in range(3):
        batch = [t[: len(t) - drop].clone() for t in case.own(inputs, rank)]  # views are guarded by their base
        same.append(torch.equal(layer(*batch), dispatch.run(here, experts, *batch)))
    return torch._dynamo.utils.counters["stats"]["unique_graphs"], same
