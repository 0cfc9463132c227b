"""Routings to time: even ones, and those that press all work onto a few experts."""

import torch
from torch import Tensor

from moe_ops import check
from moe_ops.testing import random_routing

ROUTINGS = ("uniform", "one_expert", "zipf", "empty8")
NOWHERE = "nowhere"
"""No route at all: what a call takes before it has any work."""


def routing(kind: str, T: int, E: int, top_k: int, seed: int) -> tuple[Tensor, Tensor]:
    """(topk_weights (T, top_k) fp32, topk_ids (T, top_k) int32), on the CPU.

    uniform: distinct experts, all alike. one_expert: every token to the same one, its other slots -1. zipf: distinct
    experts, the r-th most popular drawn with weight 1 / r. empty8: uniform, but every eighth expert gets none.
    """
    check.one_of("bench", "routing", kind, (*ROUTINGS, NOWHERE))
    generator = torch.Generator().manual_seed(seed)
    if kind in ("uniform", "one_expert"):
        return random_routing(T, E, top_k, kind, generator)
    weights = torch.rand(T, top_k, generator=generator) + 0.1
    weights /= weights.sum(1, keepdim=True)
    if kind == NOWHERE:
        return weights, torch.full((T, top_k), -1, dtype=torch.int32)
    popularity = torch.ones(E)
    if kind == "zipf":
        popularity = 1 / (1 + torch.randperm(E, generator=generator)).float()
    else:
        popularity[::8] = 0
    # The top_k largest of log p + Gumbel noise are a draw without replacement.
    keys = popularity.log() - torch.empty(T, E).exponential_(generator=generator).log()
    chosen = keys.topk(top_k, 1)
    return weights, torch.where(chosen.values.isneginf(), -1, chosen.indices).int()
