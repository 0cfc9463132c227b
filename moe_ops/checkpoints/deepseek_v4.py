"""DeepSeek-V4: MXFP4 experts with e8m0 scales (expert_dtype fp4), or fp8 blocks; the first layers route by token id."""

from moe_ops.checkpoints.family import Family
from moe_ops.checkpoints.layout import PerExpert

FAMILY = Family(
    name="deepseek_v4",
    model_types=("deepseek_v4",),
    block="layers.{layer}.ffn.",
    layouts=(PerExpert("w1", "w3", "w2"),),
    num_experts="n_routed_experts",
    intermediate="moe_intermediate_size",
    correction_bias="gate.bias",
    hash_table="gate.tid2eid",
    scale=".scale",
)
