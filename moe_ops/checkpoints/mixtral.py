"""Mixtral: bf16, or exports in fp8."""

from moe_ops.checkpoints.family import Family
from moe_ops.checkpoints.layout import PerExpert

FAMILY = Family(
    name="mixtral",
    model_types=("mixtral",),
    block="layers.{layer}.block_sparse_moe.",
    layouts=(PerExpert("w1", "w3", "w2"),),
    num_experts="num_local_experts",
    intermediate="intermediate_size",
)
