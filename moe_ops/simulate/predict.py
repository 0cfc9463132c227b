"""predict: one dispatch format on one wire, for one scenario."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from moe_ops import check
from moe_ops import dispatch as formats
from moe_ops.dispatch import Dispatcher, ExpertSetup
from moe_ops.dispatch.transport_deep_ep import check_low_latency
from moe_ops.parallel import Form, ParallelSizes, decide
from moe_ops.rows import BLOCK, align, ceil_div, contiguous_rows
from moe_ops.simulate import exchange
from moe_ops.simulate.links import Links
from moe_ops.simulate.memory import Memory, experts_bytes, layer_of, weight_bytes
from moe_ops.simulate.routing import Routes, draw
from moe_ops.simulate.table import TimeTable


@dataclass(frozen=True, eq=False)
class Scenario:
    """One layer over many ranks, and the tokens of one call."""

    sizes: ParallelSizes
    num_experts: int
    K: int
    I: int
    """Of an expert as one rank holds it."""
    top_k: int
    recipe: str
    scale_format: str
    ids: tuple[Tensor, ...]
    """(T, top_k) global expert ids of each token group."""
    max_tokens: int
    """Capacity of one rank; beside a split, of its share."""
    per_node: int = 8
    payload: str = "auto"
    captured: bool = False
    """Whether a graph shall hold the layer."""
    arch: str = "sm90"

    @classmethod
    def drawn(cls, popularity: Tensor, tokens: int, seed: int, *, sizes: ParallelSizes, top_k: int, **more):
        """Every token group has `tokens` tokens, their experts drawn by popularity."""
        ids = draw(popularity, [tokens] * sizes.token_groups, top_k, seed)
        return cls(sizes=sizes, top_k=top_k, ids=tuple(ids), **more)

    @property
    def tokens(self) -> int:
        """Of the fullest token group."""
        return max(len(own) for own in self.ids)

    @property
    def each(self) -> int:
        """Experts of a rank."""
        return self.num_experts // self.sizes.ep

    @cached_property
    def routes(self) -> Routes:
        """Of each rank's own tokens; the ranks of an attention-TP group share theirs out."""
        tp = self.sizes.attn_tp
        shares = (
            own[r * ceil_div(len(own), tp) : (r + 1) * ceil_div(len(own), tp)] for own in self.ids for r in range(tp)
        )
        return Routes.of(list(shares), self.num_experts, self.sizes.ep, self.per_node)

    @cached_property
    def rows(self) -> Tensor:
        """(ep, E): rows of each expert, by expert group."""
        return self.routes.rows.sum(0).unflatten(0, (self.sizes.ep, self.each))

    def setup(self) -> ExpertSetup:
        names = ("num_experts", "top_k", "K", "recipe", "scale_format", "max_tokens", "payload")
        return ExpertSetup(**{name: getattr(self, name) for name in names})


@dataclass(frozen=True, eq=False)
class Prediction:
    """Times in microseconds, sizes in bytes."""

    format: str
    wire: str
    refused: str | None
    """Why it does not run, in words; nothing below is known then."""
    form: Form | None = None
    layout: str = ""
    dispatch: Tensor | None = None
    """(ranks, ranks) bytes from row to column, the collectives before the experts included."""
    combine: Tensor | None = None
    memory: Memory | None = None
    filled: float = 0.0
    """Share of the rows of a static capacity that hold a token: of the fullest expert's slab, or of all rows."""
    dispatch_us: Tensor | None = None
    """(ranks,)"""
    gemm_us: Tensor | None = None
    combine_us: Tensor | None = None

    @property
    def us(self) -> float:
        """Of the layer: ranks wait for the slowest after every part."""
        return sum(float(part.max()) for part in (self.dispatch_us, self.gemm_us, self.combine_us) if part is not None)


class _Paper:
    """A rank of a transport that carries nothing."""

    def __init__(self, size: int, wire: str):
        self.rank, self.size, self.wire = 0, size, wire

    def check(self, op: str, setup: ExpertSetup) -> None:
        if self.wire == "deep_ep":
            check_low_latency(op, setup, self.size)


def predict(scenario: Scenario, name: str, wire: str, links: Links, table: TimeTable | None) -> Prediction:
    """One row of predict_all. table: None leaves the times of the experts out."""
    check.one_of("simulate", "format", name, exchange.WIRES[wire], f"Others were not worked out for {wire}.")
    sizes = scenario.sizes
    try:
        form = decide(sizes, name)
        dispatcher = formats.create(name, scenario.setup(), _Paper(sizes.ep, wire), captured=scenario.captured)  # type: ignore[arg-type]
    except ValueError as error:
        return Prediction(name, wire, str(error))
    tokens, share = scenario.tokens, ceil_div(scenario.tokens, sizes.attn_tp)
    sent = share if form.before == "split" else tokens
    if sent > scenario.max_tokens and (dispatcher.needs_capacity or form.before == "gather"):
        over = sent - scenario.max_tokens
        why = f"{over} of {sent} tokens of a rank are above max_tokens={scenario.max_tokens}; the call is refused."
        return Prediction(name, wire, why)
    counts = [len(own) for own in scenario.ids]
    before, after = exchange.around(sizes, form, counts, scenario.max_tokens, scenario.K, scenario.top_k)
    if form.exchange == "all_to_all":
        moved = exchange.of_format(dispatcher, wire, scenario.routes, scenario.per_node)
    else:
        moved = before * 0, before * 0
    times = [links.microseconds(part) for part in (before, moved[0], moved[1], after)]
    most = int(align(scenario.rows, BLOCK).sum(1).max())
    ours = 1.0 if wire == "torch" else 0.0  # the library's buffers are its own
    held = before + ours * moved[0], ours * moved[1], after
    memory, layout = _memory(scenario, dispatcher, form, most, held)
    return Prediction(
        name,
        wire,
        None,
        form,
        layout,
        before + moved[0],
        after + moved[1],
        memory,
        _filled(scenario, dispatcher, form),
        times[0] + times[1],
        None if table is None else _gemm(scenario, table),
        times[2] + times[3],
    )


def _memory(scenario: Scenario, dispatcher: Dispatcher, form: Form, rows: int, moved) -> tuple[Memory, str]:
    """moved: what dispatch brings, what combine exchanges, and what the collective after it does."""
    here = scenario.tokens if form.before != "gather" else scenario.sizes.token_groups * scenario.max_tokens
    tokens = dispatcher.slots if dispatcher.needs_capacity else here
    layer = layer_of(dispatcher, scenario.I, tokens, rows)
    experts, layout = experts_bytes(dispatcher, layer, scenario.arch)
    weights = weight_bytes(scenario.each, scenario.K, scenario.I, scenario.recipe, scenario.scale_format)
    into, back, after = moved
    held = into.sum(0) + back.sum(0) + back.sum(1) + after.sum(0)
    return Memory(weights, experts, int(held.max())), layout


def _filled(scenario: Scenario, dispatcher: Dispatcher, form: Form) -> float:
    """Of the fullest rank."""
    if form.exchange == "local" or dispatcher.needs_host_counts or not dispatcher.slots:
        return 1.0
    if dispatcher.layouts == ("masked",):
        return int(scenario.rows.max()) / dispatcher.slab_rows
    worst = contiguous_rows(dispatcher.slots, scenario.top_k, scenario.each)
    return int(scenario.rows.sum(1).max()) / int(worst)


def _gemm(scenario: Scenario, table: TimeTable) -> Tensor:
    each = [table.microseconds(scenario.recipe, scenario.K, scenario.I, rows) for rows in scenario.rows]
    return torch.tensor(each, dtype=torch.float64).repeat_interleave(scenario.sizes.moe_tp)


def predict_all(scenario: Scenario, links: Links, table: TimeTable | None) -> list[Prediction]:
    """Every format on every wire for which its bytes are known."""
    return [predict(scenario, name, wire, links, table) for wire, names in exchange.WIRES.items() for name in names]


def advice(rows: list[Prediction], budget: int | None = None) -> tuple[Prediction | None, str]:
    """(what to use, why): the least time among what runs and fits; of equal ones the first in dispatch.FORMATS.

    budget: bytes that one layer's weights and buffers may take on a rank; None: any.
    """
    running = [row for row in rows if row.refused is None]
    fitting = [row for row in running if budget is None or (row.memory is not None and row.memory.total <= budget)]
    if not fitting:
        return None, "no format runs with these sizes" if not running else "no format fits the memory"
    best = min(fitting, key=lambda row: row.us)
    left = f"{len(rows) - len(running)} refused, {len(running) - len(fitting)} above the memory"
    return best, f"least time of {len(fitting)} that run and fit ({left})"
