"""Which collectives stand around a MoE layer: one function decides, from the parallel sizes alone.

Attention may be data parallel (ranks have tokens of their own), context parallel (ranks have parts of a sequence: to
this layer the same) and tensor parallel (ranks have the same tokens). Experts are split by expert (ep), by intermediate
size (moe_tp), or both.
"""

from dataclasses import dataclass

from moe_ops import check
from moe_ops.dispatch import FORMATS

_OP = "decide"


@dataclass(frozen=True)
class ParallelSizes:
    """attn_dp * attn_cp * attn_tp = ep * moe_tp ranks.

    Rank r has token group r // attn_tp (data parallel first, then context), and experts of group r // moe_tp.
    """

    attn_dp: int = 1
    attn_cp: int = 1
    attn_tp: int = 1
    ep: int = 1
    moe_tp: int = 1

    def __post_init__(self) -> None:
        for name, size in vars(self).items():
            fix = "It counts ranks along one axis."
            check.value(isinstance(size, int) and size >= 1, "ParallelSizes", name, "an integer >= 1", size, fix)
        check.value(
            self.ep * self.moe_tp == self.world,
            "ParallelSizes",
            "ep * moe_tp",
            f"attn_dp * attn_cp * attn_tp = {self.world}",
            self.ep * self.moe_tp,
            "Attention and experts share the same ranks.",
        )

    @property
    def world(self) -> int:
        return self.attn_dp * self.attn_cp * self.attn_tp

    @property
    def token_groups(self) -> int:
        """Ranks, or attention-TP groups of ranks, with tokens of their own."""
        return self.attn_dp * self.attn_cp

    def __str__(self) -> str:
        return " ".join(f"{name}={size}" for name, size in vars(self).items() if size > 1) or "one rank"


@dataclass(frozen=True)
class Form:
    """What happens before and after the experts, and where the one sum over ranks is made."""

    before: str
    """none; gather: the tokens of all groups; split: this rank's share of its group's tokens."""
    exchange: str
    """local: every rank has all tokens that its experts need. all_to_all: the dispatcher brings them."""
    after: str
    """none, all_reduce, reduce_scatter, reduce_scatter_v, all_reduce_and_cut, all_gather."""
    reduced_in: str
    """after, combine, or nowhere (one rank)."""

    def __str__(self) -> str:
        return f"{self.before} -> {self.exchange} experts -> {self.after} (sum over ranks: {self.reduced_in})"


def decide(sizes: ParallelSizes, dispatch: str = "standard", *, uneven: bool = False) -> Form:
    """The form of a layer.

    Args:
        dispatch: one of dispatch.FORMATS; all but standard exchange tokens by all-to-all.
        uneven: whether the ranks know each other's token counts on the host, and gather exactly those, instead of
            every rank's max_tokens.

    Raises:
        ValueError: an all-to-all with experts that are split by intermediate size.
    """
    check.one_of(_OP, "dispatch", dispatch, tuple(FORMATS))
    if FORMATS[dispatch].reduces:
        fix = f"A {dispatch} rank returns finished rows. Use ep={sizes.world}, moe_tp=1, or dispatch='standard'."
        check.value(sizes.moe_tp == 1, _OP, "moe_tp", "1 beside an all-to-all", sizes.moe_tp, fix)
        reduced = "combine" if sizes.world > 1 else "nowhere"
        if sizes.attn_tp > 1:
            return Form("split", "all_to_all", "all_gather", reduced)
        return Form("none", "all_to_all", "none", reduced)
    if sizes.world == 1:
        return Form("none", "local", "none", "nowhere")
    if sizes.token_groups == 1:
        return Form("none", "local", "all_reduce", "after")
    if sizes.attn_tp > 1:
        return Form("gather", "local", "all_reduce_and_cut", "after")
    return Form("gather", "local", "reduce_scatter_v" if uneven else "reduce_scatter", "after")


def every_size(world: int) -> list[ParallelSizes]:
    """All ways to cut `world` ranks."""
    ways = [(a, b, world // (a * b)) for a in range(1, world + 1) for b in range(1, world + 1) if world % (a * b) == 0]
    experts = [(ep, world // ep) for ep in range(1, world + 1) if world % ep == 0]
    return [ParallelSizes(*attention, *split) for attention in ways for split in experts]


def table(world: int, dispatches: tuple[str, ...] = ("standard", "deepep_ll")) -> str:
    """The forms of all ways to cut `world` ranks, one a line."""
    lines = []
    for sizes in every_size(world):
        for dispatch in dispatches:
            if FORMATS[dispatch].reduces and sizes.moe_tp > 1:
                continue
            evens = (False, True) if decide(sizes, dispatch).before == "gather" else (False,)
            for uneven in evens:
                counts = "counts known" if uneven else ""
                lines.append((str(sizes), dispatch, counts, str(decide(sizes, dispatch, uneven=uneven))))
    header = ("sizes", "dispatch", "tokens", "form")
    widths = [max(len(line[i]) for line in [header, *lines]) for i in range(4)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in [header, *lines]
    )
