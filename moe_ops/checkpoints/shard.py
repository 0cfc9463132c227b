"""Shard: which experts, and which part of the intermediate size, one rank holds."""

import math
from dataclasses import dataclass

from moe_ops import check
from moe_ops.checkpoints.layout import Sizes
from moe_ops.checkpoints.quantization import Quantization
from moe_ops.prep.source import group_of
from moe_ops.recipes import Recipe
from moe_ops.rows import align, ceil_div

PARALLEL = ("ep", "tp")


@dataclass(frozen=True)
class Shard:
    """One rank's part of a layer."""

    experts: range
    columns: tuple[int, int]
    """[first, last) of the intermediate size."""
    padded_I: int
    """What that part is padded to: the same on every rank."""
    adds_bias: bool = True
    """Whether this rank adds the bias of the second GEMM: once in a sum over ranks."""


def shard(op: str, parallel: str, rank: int, world: int, sizes: Sizes, quant: Quantization, recipe: Recipe) -> Shard:
    """ep: E / world experts a rank. tp: every expert, and I cut at multiples of what shares a scale before and after
    preparation, so that no block is cut and the shards' weights are bit for bit the unsharded layer's. Ranks differ by
    whole blocks there, and zeros fill up the shorter ones: I = 192 in blocks of 128 gives 128 and 64 + 64 zeros.

    Raises:
        ValueError: E is not a multiple of world for ep; rank or world out of range.
    """
    check.one_of(op, "parallel", parallel, PARALLEL)
    check.value(world >= 1, op, "world", "at least 1", world, "It counts the ranks.")
    check.value(0 <= rank < world, op, "rank", f"in [0, {world})", rank, "Ranks count from 0.")
    if parallel == "ep":
        check.multiple(op, "E", sizes.E, world, "Choose a world that divides the experts, or parallel='tp'.")
        each = sizes.E // world
        return Shard(range(rank * each, (rank + 1) * each), (0, sizes.I), align(sizes.I, recipe.granule))
    granule = math.lcm(recipe.granule, *group_of(quant.kind, quant.block), 2 if quant.kind == "mxfp4" else 1)
    each = ceil_div(ceil_div(sizes.I, granule), world) * granule
    first, last = (min(edge * each, sizes.I) for edge in (rank, rank + 1))
    padded = align(min(each, sizes.I), recipe.granule)
    return Shard(range(sizes.E), (first, last), padded, adds_bias=rank == 0)
