"""gpt-oss: MXFP4 blocks and scales, or bf16 transposed; gate and up interleaved; biases."""

from moe_ops.checkpoints.family import Family
from moe_ops.checkpoints.layout import Stacked

FAMILY = Family(
    name="gpt_oss",
    model_types=("gpt_oss",),
    block="layers.{layer}.mlp.",
    layouts=(
        Stacked(interleaved=True, blocks=True, biased=True),
        Stacked(interleaved=True, transposed=True, biased=True),
    ),
    num_experts="num_local_experts",
    intermediate="intermediate_size",
    router="router.weight",
    logit_bias="router.bias",
)
