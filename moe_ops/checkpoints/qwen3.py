"""Qwen2-MoE, Qwen3-MoE and their kin: bf16, fp8 blocks, or exports in other fp8 formats."""

from moe_ops.checkpoints.family import Family
from moe_ops.checkpoints.layout import PerExpert, Stacked

FAMILY = Family(
    name="qwen3",
    model_types=("qwen2_moe", "qwen3_moe", "qwen3_next", "qwen3_moe_text", "qwen3_vl_moe_text"),
    block="layers.{layer}.mlp.",
    layouts=(PerExpert("gate_proj", "up_proj", "down_proj"), Stacked()),
    num_experts="num_experts",
    intermediate="moe_intermediate_size",
)
