"""Layers over many ranks: a ParallelCase builds one rank's ParallelMoE, runs it, and knows the whole layer's result."""

from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from moe_ops.dispatch import Experts, Overlap
from moe_ops.parallel import ParallelGroups, ParallelMoE, ParallelSizes, decide, split_experts, split_intermediate
from moe_ops.prep import prepare_weights
from moe_ops.testing.cases import LayerCase
from moe_ops.testing.dispatch_cases import built

VOCABULARY = 50


class HashRouter:
    """Routes by token id: a row whose id went astray gets other experts."""

    def __init__(self, E: int, top_k: int):
        generator = torch.Generator().manual_seed(5)
        self.ids = torch.rand(VOCABULARY, E, generator=generator).argsort(1)[:, :top_k].int()
        self.weights = torch.rand(VOCABULARY, top_k, generator=generator)

    def __call__(self, hidden_states: Tensor, token_ids: Tensor | None) -> tuple[Tensor, Tensor]:
        assert token_ids is not None and token_ids.shape == hidden_states.shape[:1]
        return self.weights[token_ids], self.ids[token_ids]


class SharedExpert(torch.nn.Module):
    """down(silu(up(x))), whole or one rank's columns of it."""

    def __init__(self, K: int, rank: int = 0, ranks: int = 1):
        super().__init__()
        generator = torch.Generator().manual_seed(6)
        up, down = (torch.randn(64, K, generator=generator) / K**0.5 for _ in range(2))
        self.up, self.down = (t.chunk(ranks)[rank].bfloat16() for t in (up, down))

    def forward(self, x: Tensor) -> Tensor:
        return F.silu(x @ self.up.T) @ self.down


@dataclass(frozen=True)
class ParallelCase:
    """`tokens[g]` tokens in token group g."""

    sizes: ParallelSizes
    dispatch: str
    tokens: tuple[int, ...]
    uneven: bool = False
    recipe: str = "bf16"
    shared: str = "replicated"
    E: int = 8
    K: int = 256
    I: int = 512
    top_k: int = 3
    scaling: float = 2.5
    max_tokens: int = 9

    def __str__(self) -> str:
        axes = "-".join(f"{name}{size}" for name, size in vars(self.sizes).items() if size > 1)
        return "-".join((axes or "one", self.dispatch, "uneven" if self.uneven else "slots", self.shared, self.recipe))

    @property
    def layer(self) -> LayerCase:
        return LayerCase(self.recipe, T=sum(self.tokens), E=self.E, K=self.K, I=self.I, top_k=self.top_k)

    def inputs(self) -> tuple[Tensor, Tensor]:
        """(hidden_states, token_ids) of all token groups in turn."""
        (x, _, _), _ = built(self.layer)
        return x, token_ids_of(x)

    def own(self, group: dist.ProcessGroup) -> list[Tensor]:
        """The inputs of one rank's token group."""
        return [t.split(self.tokens)[dist.get_rank(group) // self.sizes.attn_tp] for t in self.inputs()]

    def rank_layer(self, group: dist.ProcessGroup, **more) -> ParallelMoE:
        """One rank's layer, cut out of the whole weights."""
        rank, sizes = dist.get_rank(group), self.sizes
        _, weights = built(self.layer)
        weights = split_experts(weights, rank // sizes.moe_tp, sizes.ep)
        weights = split_intermediate(weights, rank % sizes.moe_tp, sizes.moe_tp)
        place = (rank, sizes.world) if self.shared == "sharded" else (0, 1)
        return ParallelMoE(
            HashRouter(self.E, self.top_k),
            Experts(weights),
            sizes,
            top_k=self.top_k,
            dispatch=self.dispatch,
            groups=ParallelGroups.of(sizes, group),
            max_tokens=self.max_tokens,
            uneven=self.uneven,
            shared_expert=SharedExpert(self.K, *place),
            shared=self.shared,
            routed_scaling_factor=self.scaling,
            **more,
        )

    def expected(self) -> tuple[Tensor, Tensor]:
        """(T, K) of the whole layer: in float64, and as one process computes it."""
        return _whole(self.layer, self.scaling)


@lru_cache(maxsize=8)
def _whole(layer: LayerCase, scaling: float) -> tuple[Tensor, Tensor]:
    (x, _, _), weights = built(layer)
    inputs = (x, *HashRouter(layer.E, layer.top_k)(x, token_ids_of(x)))
    shared = SharedExpert(layer.K)
    judged = layer.judge(inputs, weights, routed_scaling_factor=scaling)
    exact = F.silu(x.double() @ shared.up.double().T) @ shared.down.double()
    return judged + exact, layer.run(inputs, weights, routed_scaling_factor=scaling) + shared(x)


def token_ids_of(x: Tensor) -> Tensor:
    """(T,) ids that differ from row to row."""
    return torch.arange(len(x)) * 7 % VOCABULARY


def run_parallel(group: dist.ProcessGroup, case: ParallelCase) -> Tensor:
    """For RankPool.run: one rank of a case."""
    layer = case.rank_layer(group)
    tokens = list(case.tokens) if case.uneven and decide(case.sizes, case.dispatch).before == "gather" else None
    return layer(*case.own(group), tokens=tokens)


def run_padded(group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """(one rank's result, that of one process) of a layer over two ranks whose K and I the recipe's groups do not
    divide: 200 and 192, padded to 256."""
    rank, generator = dist.get_rank(group), torch.Generator().manual_seed(0)
    w13 = torch.randn(4, 2 * 192, 200, generator=generator) / 200**0.5
    w2 = torch.randn(4, 200, 192, generator=generator) / 192**0.5
    weights = prepare_weights(w13, w2, recipe="fp8_block")
    x = torch.randn(9, 200, generator=generator).bfloat16()
    router = HashRouter(4, 2)
    layer = ParallelMoE(
        router,
        Experts(split_experts(weights, rank, 2)),
        ParallelSizes(attn_tp=2, ep=2),
        top_k=2,
        dispatch="deepep_ll",
        groups=ParallelGroups.of(ParallelSizes(attn_tp=2, ep=2), group),
        max_tokens=9,
        shared_expert=SharedExpert(200),
    )
    token_ids = token_ids_of(x)
    alone = Experts(weights).on_tokens(weights.pad_hidden(x), *router(x, token_ids))
    return layer(x, token_ids), weights.cut_hidden(alone) + SharedExpert(200)(x)


def run_parallel_routes(group: dist.ProcessGroup, case: ParallelCase) -> int:
    """For RankPool.run: how many routes one rank hands to its dispatcher."""
    layer = case.rank_layer(group)
    seen = []
    dispatch = layer.dispatcher.dispatch

    def counting(hidden_states: Tensor, topk_weights: Tensor, topk_ids: Tensor):
        seen.append(int((topk_ids >= 0).sum()))
        return dispatch(hidden_states, topk_weights, topk_ids)

    layer.dispatcher.dispatch = counting  # type: ignore[method-assign]
    layer(*case.own(group))
    return sum(seen)


def run_parallel_compiled(group: dist.ProcessGroup, case: ParallelCase, backend: str) -> tuple[int, list[bool]]:
    """(compiled variants, whether each call has eager's bits): this rank's tokens, then fewer and fewer of them."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    layer = case.rank_layer(group, captured=True)
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=backend)
    x, token_ids = case.own(group)
    same = []
    for drop in range(3):
        batch = [t[: len(x) - drop].clone() for t in (x, token_ids)]  # views are guarded by what they are views of
        same.append(torch.equal(compiled(*batch), layer(*batch)))
    return torch._dynamo.utils.counters["stats"]["unique_graphs"], same


def run_parallel_overlapped(group: dist.ProcessGroup, case: ParallelCase) -> Tensor:
    """For RankPool.run: one rank of a case, in two overlapped parts."""
    return case.rank_layer(group, overlap=Overlap())(*case.own(group))
