"""A MoE layer over many ranks: the form decided from the parallel sizes, the groups, each rank's weights, the layer."""

from moe_ops.parallel.failure import PeerError, failing_together
from moe_ops.parallel.form import Form, ParallelSizes, decide, every_size, table
from moe_ops.parallel.groups import ParallelGroups
from moe_ops.parallel.layer import ParallelMoE
from moe_ops.parallel.weights import split_experts, split_intermediate

__all__ = [
    "Form",
    "ParallelGroups",
    "ParallelMoE",
    "ParallelSizes",
    "PeerError",
    "decide",
    "every_size",
    "failing_together",
    "split_experts",
    "split_intermediate",
    "table",
]
