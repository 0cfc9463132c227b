"""Small random models of transformers, and single experts modules of any of its families."""

import inspect
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

_COMMON = dict(
    vocab_size=64,
    hidden_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=None,
    initializer_range=0.2,
)
_SIZES = dict(intermediate_size=128, moe_intermediate_size=128, head_dim=32, num_experts_per_tok=2)
_LATENT = dict(q_lora_rank=32, kv_lora_rank=32, qk_nope_head_dim=32, qk_rope_head_dim=16, v_head_dim=32)

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_moe": ("Qwen3Moe", dict(**_SIZES, num_experts=8)),
    "mixtral": ("Mixtral", dict(intermediate_size=128, head_dim=32, num_experts_per_tok=2, num_local_experts=8)),
    "olmoe": ("Olmoe", dict(intermediate_size=128, num_experts_per_tok=2, num_experts=8)),
    "deepseek_v3": (
        "DeepseekV3",
        dict(
            intermediate_size=128,
            moe_intermediate_size=128,
            num_experts_per_tok=2,
            **_LATENT,
            n_routed_experts=8,
            n_shared_experts=1,
            n_group=2,
            topk_group=1,
            first_k_dense_replace=1,
            num_key_value_heads=4,
        ),
    ),
    "deepseek_v4": (
        "DeepseekV4",
        dict(
            moe_intermediate_size=128,
            num_experts_per_tok=2,
            n_routed_experts=8,
            num_key_value_heads=1,
            head_dim=32,
            q_lora_rank=32,
            o_lora_rank=32,
            o_groups=2,
            index_n_heads=4,
            index_head_dim=32,
            index_topk=8,
            num_hash_layers=1,
            hc_mult=2,
            swiglu_limit=1.5,
        ),
    ),
    "gpt_oss": (
        "GptOss",
        dict(intermediate_size=128, head_dim=32, num_experts_per_tok=2, num_local_experts=8, sliding_window=16),
    ),
    "glm4_moe": (
        "Glm4Moe",
        dict(**_SIZES, n_routed_experts=8, n_shared_experts=1, n_group=1, topk_group=1, first_k_dense_replace=1),
    ),
}
"""Family that routes or computes in a way of its own -> the stem of its class names, and its configuration."""


def small_model(family: str, *, dtype: torch.dtype = torch.float32, seed: int = 0, **changes: Any):
    """A model for generation, on the CPU, ready for inference: K = 128, I = 128, 8 experts, 2 a token.

    changes: of the configuration.
    """
    import transformers

    stem, own = FAMILIES[family]
    config = getattr(transformers, f"{stem}Config")(**{**_COMMON, **own, **changes})
    torch.manual_seed(seed)
    model = getattr(transformers, f"{stem}ForCausalLM")(config)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(parameter.data, std=0.1)
    return model.eval().requires_grad_(False).to(dtype)


class ExpertsConfig(SimpleNamespace):
    """A configuration for an experts module of any family: E experts, sizes K and I under every name, and constants
    under the names by which families read them."""

    def __init__(self, *, E: int, K: int, I: int, implementation: str = "eager", **given: Any):
        common = dict(hidden_act="silu", hidden_activation="silu", mlp_hidden_act="silu", scoring_func="sigmoid")
        common |= dict(swiglu_limit=1.5, swiglu_alpha=1.702, mlp_gate_softcap=2.5, mlp_up_softcap=3.5)
        common |= dict(moe_latent_size=None, rms_norm_eps=1e-6, post_norm_eps=1e-6)
        super().__init__(E=E, K=K, I=I, _experts_implementation=implementation, **{**common, **given})

    def __getattr__(self, name: str) -> int:
        if "expert" in name and ("num" in name or name.startswith("n_")):
            return self.E
        if "intermediate" in name:
            return self.I
        if "hidden_size" in name:
            return self.K
        raise AttributeError(name)


def filled(module: nn.Module) -> nn.Module:
    """Random experts of about unit gain, and everything else random too; ready for inference."""
    for parameter in module.parameters():
        nn.init.normal_(parameter.data, std=0.12 if parameter.dim() == 3 else 0.5)
    return module.eval().requires_grad_(False)


def fp8_experts(config: ExpertsConfig, *, fp4: bool = False, **arguments: Any) -> nn.Module:
    """What transformers' fine-grained fp8 quantiser puts in the place of experts; its values are not set."""
    from transformers.integrations.finegrained_fp8 import ALL_FP8_EXPERTS_FUNCTIONS, FP8Experts
    from transformers.integrations.moe import use_experts_implementation

    kind = type("FP8Experts", (FP8Experts,), {})  # the decorator changes the class that it is given
    if "expert_dtype" in inspect.signature(FP8Experts.__init__).parameters:
        arguments["expert_dtype"] = "fp4" if fp4 else "fp8"
    else:  # transformers 5.17 reads the configuration
        config.expert_dtype = "fp4" if fp4 else "fp8"
    kind = use_experts_implementation(kind, experts_interface=ALL_FP8_EXPERTS_FUNCTIONS)
    return kind(config, **{"block_size": (128, 128), **arguments}).eval().requires_grad_(False)
