"""Which tokens go where: drawn from a distribution of experts, or counted from real routes."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from moe_ops import check

DISTRIBUTIONS = ("uniform", "zipf")
POOL = 1 << 15
"""Tokens that are drawn one by one; more tokens than that are picked among so many."""
_OP = "simulate"


@dataclass(frozen=True)
class Routes:
    """Counts over the tokens of each source rank. Rows are (token, distinct expert) pairs."""

    rows: Tensor
    """(sources, E) int64."""
    visits: Tensor
    """(sources, ranks) int64: tokens with an expert on that rank, each once."""
    node_visits: Tensor
    """(sources, nodes) int64: tokens with an expert on that node, each once."""

    @classmethod
    def of(cls, ids: Sequence[Tensor], E: int, ranks: int, per_node: int) -> "Routes":
        """From each source's (T, top_k) global ids; other ids than [0, E), -1 among them, are no route."""
        each, nodes = E // ranks, -(-ranks // per_node)
        counts = ([], [], [])
        for own in ids:
            expert = torch.where((own >= 0) & (own < E), own, E).int()
            for kept, (key, size) in zip(
                counts, ((expert, E), (expert // each, ranks), (expert // (each * per_node), nodes)), strict=True
            ):
                kept.append(_distinct(torch.where(expert < E, key, size), size))
        return cls(*(torch.stack(kept) for kept in counts))


def _distinct(key: Tensor, size: int) -> Tensor:
    """(size,) how many rows of `key` hold each value of [0, size)."""
    columns = key.T.contiguous()
    for column in range(1, len(columns)):
        for before in range(column):
            columns[column].masked_fill_(columns[column] == columns[before], size)
    return torch.bincount(columns.flatten(), minlength=size + 1)[:size]


def popularity_of(routing: str, E: int, seed: int) -> Tensor:
    """(E,) float64 weights with which experts are drawn.

    Args:
        routing: uniform; zipf: 1, 1/2, 1/3, ... in a random order of experts; or a file of JSON, a list of how often
            each expert was chosen.

    Raises:
        ValueError: the file is no such list.
    """
    if routing == "uniform":
        return torch.ones(E, dtype=torch.float64)
    if routing == "zipf":
        order = torch.randperm(E, generator=torch.Generator().manual_seed(seed))
        return 1 / (1 + order).double()
    rule = "uniform, zipf or a file"
    check.value(Path(routing).is_file(), _OP, "routing", rule, repr(routing), "Check the path.")
    fix = "Record one count for each expert of the layer, in the order of their ids."
    try:
        counts = torch.tensor(json.loads(Path(routing).read_text()), dtype=torch.float64)
    except (ValueError, TypeError, RuntimeError):
        raise ValueError(check.sentence(_OP, "routing", f"a JSON list of {E} numbers", routing, fix)) from None
    check.shape(_OP, "routing", counts, (E,), "(E,)", fix)
    fits = bool((counts >= 0).all() and counts.sum() > 0 and counts.isfinite().all())
    check.value(fits, _OP, "routing", "counts of 0 and more, not all 0", routing, fix)
    return counts


def draw(popularity: Tensor, tokens: Sequence[int], top_k: int, seed: int) -> list[Tensor]:
    """Each source's (T, top_k) ids: distinct experts, drawn without replacement. -1 where too few have a weight."""
    generator, total = torch.Generator().manual_seed(seed), sum(tokens)
    drawn = min(total, POOL)
    # The top_k largest of log p + Gumbel noise are a draw without replacement.
    noise = torch.empty(drawn, len(popularity)).exponential_(generator=generator).log()
    best = (popularity.log().float() - noise).topk(top_k, 1)
    pool = torch.where(best.values.isneginf(), -1, best.indices).int()
    if total == drawn:
        return list(pool.split(list(tokens)))
    return [pool[torch.randint(drawn, (T,), generator=generator)] for T in tokens]
