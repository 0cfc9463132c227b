"""Links: how fast ranks exchange bytes. The numbers are assumptions until somebody measures them."""

from dataclasses import dataclass

import torch
from torch import Tensor

from moe_ops import check


@dataclass(frozen=True)
class Links:
    """Nominal rates, not measured here: NVLink 4 in a node, one 400 Gbit/s adapter a rank between nodes."""

    per_node: int = 8
    """Ranks of a node."""
    intra: float = 450.0
    """GB/s that one rank sends, and receives, within its node."""
    inter: float = 50.0
    """GB/s that one rank sends, and receives, across nodes."""
    latency_us: float = 10.0
    """Of one exchange, whatever its bytes."""

    def __post_init__(self) -> None:
        for name, rate in vars(self).items():
            at_least = 0 if name == "latency_us" else 1e-9
            fix = "GB/s a rank and direction, ranks a node, or microseconds."
            check.value(rate >= at_least, "Links", name, "positive", rate, fix)

    def sent(self, nbytes: Tensor) -> tuple[Tensor, Tensor]:
        """(within its node, to other nodes): bytes that each rank sends, of (ranks, ranks) from row to column."""
        ranks = torch.arange(len(nbytes))
        same = ranks[:, None] // self.per_node == ranks // self.per_node
        others = ranks[:, None] != ranks
        return (nbytes * (same & others)).sum(1), (nbytes * ~same).sum(1)

    def microseconds(self, nbytes: Tensor) -> Tensor:
        """(ranks,) time of one exchange: the longer of both kinds of links, which work at once, in the fuller of both
        directions. 0 for a rank that exchanges nothing with others."""
        there, back = self.sent(nbytes), self.sent(nbytes.T)
        intra, inter = (torch.maximum(a, b) for a, b in zip(there, back, strict=True))
        us = torch.maximum(intra / self.intra, inter / self.inter) * 1e-3
        return torch.where(intra + inter > 0, us + self.latency_us, 0.0)
