"""ParallelMoE: one rank of a MoE layer whose attention and experts are split over ranks."""

from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import Tensor, nn

from moe_ops import check
from moe_ops import dispatch as formats
from moe_ops.dispatch import Experts, ExpertSetup, Overlap, TorchTransport, Transport
from moe_ops.dispatch.transport_torch import filled
from moe_ops.dispatch.wire import as_bytes, from_bytes
from moe_ops.parallel.form import ParallelSizes, decide
from moe_ops.parallel.groups import ParallelGroups
from moe_ops.rows import ceil_div

Router = Callable[[Tensor, Tensor | None], tuple[Tensor, Tensor]]
SHARED = ("replicated", "sharded")
_OP = "ParallelMoE"


class ParallelMoE(nn.Module):
    """out = shared_expert(x) + routed_scaling_factor * sum over the chosen experts of weight * expert(x).

    The collectives around the experts are those that parallel.decide names, in `form`; the sum over ranks is made once.
    Every row is routed once, where it belongs, and its routes travel with it: ranks cannot disagree about them.

    Args:
        router: (hidden_states (T, K), token_ids (T,) or None) -> (topk_weights, topk_ids (T, top_k)), global ids. The
            same on every rank.
        experts: this rank's own (split_experts, split_intermediate, load_moe_weights).
        sizes: how the ranks are cut.
        top_k: routes a token.
        dispatch: one of dispatch.FORMATS.
        groups: ParallelGroups.of(sizes). None: made here, by all ranks of the job.
        max_tokens: most tokens that one rank sends (its share, beside a split), the same on every rank. The capacity of
            a gather that is not uneven, and of an all-to-all without host counts.
        uneven: forward is told every token group's count, and gathers exactly those rows.
        shared_expert: a module (T, K) -> (T, K), or None. shared: replicated, whole on every rank; or sharded, so that
            the ranks' results add up, which needs an experts' side that adds up too (dispatch="standard").
        routed_scaling_factor: multiplies the routed sum, once.
        payload: see ExpertSetup. layout: see dispatch.create. captured: refuses what no graph can hold.
        transport: carries the tokens of an all-to-all; None: TorchTransport on the same ranks.
        overlap: splits the tokens of an all-to-all, so that experts of one part run beside the journeys of the others;
            see dispatch.Overlap.

    Raises:
        ValueError: sizes, experts and dispatch that do not go together.
    """

    def __init__(
        self,
        router: Router,
        experts: Experts,
        sizes: ParallelSizes,
        *,
        top_k: int,
        dispatch: str = "standard",
        groups: ParallelGroups | None = None,
        max_tokens: int | None = None,
        uneven: bool = False,
        shared_expert: Callable[[Tensor], Tensor] | None = None,
        shared: str = "replicated",
        routed_scaling_factor: float = 1.0,
        payload: str = "auto",
        layout: str = "auto",
        captured: bool = False,
        transport: Transport | None = None,
        overlap: Overlap | None = None,
    ):
        super().__init__()
        self.sizes, self.form = sizes, decide(sizes, dispatch, uneven=uneven)
        self.groups = ParallelGroups.of(sizes) if groups is None else groups
        self.router, self.experts, self.shared_expert = router, experts, shared_expert
        check.one_of(_OP, "shared", shared, SHARED)
        fix = "There a rank's rows are whole: replicate the shared expert."
        rule = "replicated beside an all-to-all"
        check.value(shared == "replicated" or self.form.exchange == "local", _OP, "shared", rule, shared, fix)
        self.add_late = shared_expert is not None and shared == "replicated"
        self.add_early = shared_expert is not None and shared == "sharded"
        gathers_slots = self.form.before == "gather" and not uneven
        fix = "It is the number of rows that every rank sends; or pass uneven=True and the counts to forward."
        check.value(max_tokens is not None or not gathers_slots, _OP, "max_tokens", "given to a gather", None, fix)
        self.uneven, self.max_tokens = uneven and self.form.before == "gather", max_tokens
        fix = "Another batch has other counts: let ranks send max_tokens slots."
        check.value(not (captured and self.uneven), _OP, "uneven", "False for what is captured", True, fix)
        local = self.form.exchange == "local"
        fix = "Here no token travels between dispatch and combine."
        check.value(overlap is None or not local, _OP, "overlap", "None beside local experts", overlap, fix)
        self.overlap = overlap
        setup = ExpertSetup.of(
            experts.weights,
            ranks=sizes.ep,
            top_k=top_k,
            max_tokens=max_tokens if overlap is None else overlap.capacity(max_tokens),
            payload=payload,
            routed_scaling_factor=routed_scaling_factor,
        )
        if self.form.exchange == "all_to_all":
            carrier = TorchTransport(self.groups.process_group) if transport is None else transport
        else:
            carrier = cast(Transport, _Place(self.groups.world.rank // sizes.moe_tp, sizes.ep))
        self.dispatcher = formats.create(dispatch, setup, carrier, layout=layout, captured=captured)

    def forward(
        self, hidden_states: Tensor, token_ids: Tensor | None = None, *, tokens: Sequence[int] | None = None
    ) -> Tensor:
        """(T, K) -> (T, K) for this rank's tokens. Every rank calls it, in step, also with T = 0.

        Args:
            token_ids: (T,) ints for a router that asks for them.
            tokens: T of every token group, for uneven layers.

        Raises:
            ValueError: counts are missing, superfluous, or not this rank's; T above max_tokens.
        """
        self._check_counts(hidden_states, tokens)
        if self.form.before == "split":
            return self._split(hidden_states, token_ids)
        batch = self._routed(hidden_states, token_ids)
        if self.form.before == "gather":
            out = self._gathered(batch, tokens)
        else:
            out = self._experts(*batch)
            out = self.groups.world.all_reduce(out) if self.form.after == "all_reduce" else out
        return self._finished(out, hidden_states)

    def _routed(self, hidden_states: Tensor, token_ids: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        topk_weights, topk_ids = self.router(hidden_states, token_ids)
        return self.experts.weights.pad_hidden(hidden_states), topk_weights.float(), topk_ids.int()

    def _experts(self, x: Tensor, topk_weights: Tensor, topk_ids: Tensor) -> Tensor:
        out = formats.run(self.dispatcher, self.experts, x, topk_weights, topk_ids, overlap=self.overlap)
        if self.add_early:
            assert self.shared_expert is not None
            cut = self.experts.weights.cut_hidden
            out = cut(out) + self.shared_expert(cut(x))
            return self.experts.weights.pad_hidden(out)
        return out

    def _finished(self, out: Tensor, hidden_states: Tensor) -> Tensor:
        out = self.experts.weights.cut_hidden(out)
        if self.add_late:
            assert self.shared_expert is not None
            out = out + self.shared_expert(hidden_states)
        return out

    def _gathered(self, batch: tuple[Tensor, Tensor, Tensor], tokens: Sequence[int] | None) -> Tensor:
        """The tokens of all groups through this rank's experts; this rank's rows of the sum."""
        x, topk_weights, topk_ids = batch
        T, group = x.shape[0], self.groups.tokens
        parts = (x, topk_ids, topk_weights)
        if tokens is None:
            C = self._capacity(T)
            parts = (filled(x, C), filled(topk_ids, C, -1), filled(topk_weights, C))
        rows = torch.cat([as_bytes(part) for part in parts], 1)
        rows = group.all_gather(rows) if tokens is None else group.all_gather_v(rows, tokens)
        widths = [part.shape[1] * part.dtype.itemsize for part in parts]
        bytes_of = rows.split(widths, 1)
        x, topk_ids, topk_weights = (from_bytes(b, part.dtype) for b, part in zip(bytes_of, parts, strict=True))
        out = self._experts(x, topk_weights, topk_ids)
        if self.form.after == "reduce_scatter":
            return self.groups.world.reduce_scatter(out).narrow(0, 0, T)  # [:T] would compile T = max_tokens by itself
        if self.form.after == "reduce_scatter_v":
            assert tokens is not None
            return self.groups.world.reduce_scatter_v(out, tokens)
        start = group.rank * self._capacity(T) if tokens is None else sum(tokens[: group.rank])
        return self.groups.world.all_reduce(out).narrow(0, start, T)

    def _split(self, hidden_states: Tensor, token_ids: Tensor | None) -> Tensor:
        """This rank's share of the rows that its attention-TP group has in common; then all of them again.

        Shares are equal, the last ones filled up with rows that have no route.
        """
        T, group = hidden_states.shape[0], self.groups.attn_tp
        each = ceil_div(T, group.size)
        start = group.rank * each
        own = filled(hidden_states, each * group.size)[start : start + each]
        if token_ids is not None:
            token_ids = filled(token_ids[:, None], each * group.size)[start : start + each, 0]
        x, topk_weights, topk_ids = self._routed(own, token_ids)
        real = torch.arange(each, device=topk_ids.device) + start < T
        out = self._experts(x, topk_weights, torch.where(real[:, None], topk_ids, -1))
        return group.all_gather(self._finished(out, own))[:T]

    def _capacity(self, T) -> int:
        assert self.max_tokens is not None
        if T > self.max_tokens:
            fix = "Raise max_tokens on every rank, or split the batch."
            rule = f"of at most max_tokens={self.max_tokens} tokens"
            raise ValueError(check.sentence(_OP, "hidden_states", rule, T, fix))
        return self.max_tokens

    def _check_counts(self, hidden_states: Tensor, tokens: Sequence[int] | None) -> None:
        if (tokens is not None) != self.uneven:
            rule = "given to an uneven layer that gathers, and to no other"
            raise ValueError(check.sentence(_OP, "tokens", rule, tokens, f"This layer's form: {self.form}."))
        if tokens is not None:
            group, T = self.groups.tokens, hidden_states.shape[0]
            if len(tokens) != group.size or tokens[group.rank] != T:
                rule = f"{group.size} counts, {T} at place {group.rank}"
                raise ValueError(check.sentence(_OP, "tokens", rule, list(tokens), "Pass every token group's T."))

    def extra_repr(self) -> str:
        return f"{self.sizes}, {self.dispatcher.name}: {self.form}"


class _Place:
    """A rank among the expert groups, where nothing travels."""

    def __init__(self, rank: int, size: int):
        self.rank, self.size = rank, size

    def check(self, op: str, setup: ExpertSetup) -> None:
        """Nothing to carry."""
