"""DeepSeek-V2, V3, R1 and their kin: fp8 in 128 x 128 blocks, or bf16."""

from moe_ops.checkpoints.family import Family
from moe_ops.checkpoints.layout import PerExpert, Stacked

FAMILY = Family(
    name="deepseek_v3",
    model_types=("deepseek_v2", "deepseek_v3", "deepseek_v32", "kimi_k2", "glm4_moe"),
    block="layers.{layer}.mlp.",
    layouts=(PerExpert("gate_proj", "up_proj", "down_proj"), Stacked()),
    num_experts="n_routed_experts",
    intermediate="moe_intermediate_size",
    correction_bias="gate.e_score_correction_bias",
)
