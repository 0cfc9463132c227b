"""ParallelGroups: the groups of ranks that a layer's collectives run in."""

from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from moe_ops import check
from moe_ops.dispatch.collectives import Collectives
from moe_ops.parallel.form import ParallelSizes


@dataclass(frozen=True)
class ParallelGroups:
    """One rank's groups. Put together by hand where an application has its own (a DeviceMesh, pipeline stages)."""

    world: Collectives
    """All ranks of the layer."""
    tokens: Collectives
    """One rank of each token group: those at the same place of their attention-TP group."""
    attn_tp: Collectives
    """The ranks with the same tokens."""
    process_group: dist.ProcessGroup | None = None
    """That of `world`, for the transport; None: all ranks of the job."""

    @classmethod
    def of(
        cls, sizes: ParallelSizes, group: dist.ProcessGroup | None = None, *, timeout: timedelta | None = None
    ) -> "ParallelGroups":
        """Makes the groups that `sizes` needs among the ranks of `group` (None: of the job), by rank order.

        Where there are groups to make, all ranks of the job call it, as torch.distributed.new_group asks.

        Args:
            timeout: of collectives in the groups that are made; None: the default of torch.distributed.

        Raises:
            ValueError: the group is not sizes.world ranks; or it is a part of the job and would be cut further.
        """
        world = Collectives(group)
        fix = "Start as many ranks as the parallel sizes multiply to, or pass the group of those that share the layer."
        check.value(world.size == sizes.world, "ParallelGroups", "group", f"of {sizes.world} ranks", world.size, fix)
        ranks, tp = range(world.size), sizes.attn_tp
        by_place = [list(ranks[place::tp]) for place in range(tp)]
        by_tokens = [list(ranks[first : first + tp]) for first in ranks[::tp]]
        tokens = _mine(by_place, world.rank % tp, world, timeout)
        return cls(world, tokens, _mine(by_tokens, world.rank // tp, world, timeout), group)


def _mine(parts: list[list[int]], index: int, world: Collectives, timeout: timedelta | None) -> Collectives:
    """The part at `index`, which this rank is in."""
    if len(parts) == 1:
        return world
    if len(parts) == world.size:
        return Collectives.alone()
    rule, job = "all ranks of the job where it is cut into smaller ones", dist.get_world_size()
    fix = "Make the smaller groups in the application, and pass ParallelGroups(world, tokens, attn_tp, group)."
    check.value(world.size == job, "ParallelGroups", "group", rule, f"{world.size} of {job}", fix)
    own = [dist.new_group(part, timeout=timeout) for part in parts][index]
    assert isinstance(own, dist.ProcessGroup)  # not the mark of a rank outside
    return Collectives(own)
