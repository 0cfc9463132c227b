"""moe_ops in vLLM: its entry point of the group vllm.general_plugins adds a quantization named "moe_ops".

    LLM("Qwen/Qwen3-30B-A3B", quantization="moe_ops")      # or --quantization moe_ops

It takes bf16 checkpoints, and fp8 ones in 128 x 128 blocks, as they are: vLLM loads them, runs their linears and brings
tokens to their experts; the experts run in moe::fused_deepgemm, in vLLM's own workspace. Nothing changes for a model
that does not ask. Read off vLLM 0.34.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor

from moe_ops import check
from moe_ops.arch import arch_of, capability, here, runs
from moe_ops.integrations.engines import imported, weights
from moe_ops.planner import workspace_bytes
from moe_ops.sizes import Layer

NAME = "moe_ops"
"""What `quantization=` calls it."""

OP = "moe_ops.integrations.vllm"
_LAYERS = "vllm.model_executor.layers"


def register() -> None:
    """Makes quantization="moe_ops" known. vLLM calls it in each of its processes.

    What is registered is light: a vLLM whose experts are not as ours need them goes on for models that do not ask.

    Raises:
        ImportError: this vLLM has no quantization to register.
    """
    (registered,) = _vllm(f"{_LAYERS}.quantization", "register_quantization_config")
    (base,) = _vllm(f"{_LAYERS}.quantization.base_config", "QuantizationConfig")

    class Asked(base):
        """vLLM makes a config of it in two ways; both give a MoeOpsConfig, or say in words what is missing."""

        def __new__(cls):
            return config_class()()

        @classmethod
        def from_config(cls, config):
            return config_class().from_config(config)

        @classmethod
        def override_quantization_method(cls, hf_quant_cfg, user_quant, hf_config=None) -> str | None:
            """An fp8 checkpoint may be asked to run as moe_ops; no other kind is ours."""
            return NAME if user_quant == NAME and hf_quant_cfg.get("quant_method") == "fp8" else None

        @staticmethod
        def get_config_filenames() -> list[str]:
            return []

    registered(NAME)(Asked)


@cache
def experts_class() -> Any:
    """MoeOpsExperts, a FusedMoEExpertsModular."""
    base, formats = _vllm(f"{_LAYERS}.fused_moe.modular_kernel", "FusedMoEExpertsModular", "FusedMoEActivationFormat")
    (reduced,) = _vllm(f"{_LAYERS}.fused_moe.topk_weight_and_reduce", "TopKWeightAndReduceNoOP")
    (activations,) = _vllm(f"{_LAYERS}.fused_moe.activation", "MoEActivation")
    schemes = _vllm(f"{_LAYERS}.quantization.utils.quant_utils", "kFp8Static128BlockSym", "kFp8Dynamic128Sym")

    class MoeOpsExperts(base):
        """vLLM's experts between its prepare and its finalize: rows come in bf16 and go out weighted and summed."""

        @staticmethod
        def activation_format():
            return formats.PaddedStandard  # a row without a route costs nothing and is zero

        @property
        def expects_unquantized_inputs(self) -> bool:
            return True

        @staticmethod
        def _supports_current_device() -> bool:
            return not torch.cuda.is_available() or capability() >= (9, 0)

        @staticmethod
        def _supports_no_act_and_mul() -> bool:
            return False

        @staticmethod
        def _supports_quant_scheme(weight_key, activation_key) -> bool:
            if (weight_key, activation_key) == tuple(schemes):
                return runs("fp8_block", "fp32", _device())
            return weight_key is None and activation_key is None

        @staticmethod
        def _supports_activation(activation) -> bool:
            return activation in (activations.SILU, activations.SWIGLUOAI_UNINTERLEAVE)

        @staticmethod
        def _supports_parallel_config(moe_parallel_config) -> bool:
            return True

        def finalize_weight_and_reduce_impl(self):
            return reduced()

        def workspace_shapes(
            self, M, N, K, topk, global_num_experts, local_num_experts, expert_tokens_meta, activation
        ) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
            """The first buffer is the output alone; the second is the plan's arena, in elements of vLLM's dtype."""
            recipe, scale_format = ("bf16", "none") if self.quant_dtype is None else ("fp8_block", "fp32")
            layer = Layer(M, topk, local_num_experts, K, N // 2, recipe, scale_format, num_experts=global_num_experts)
            itemsize = self.workspace_dtype(self.moe_config.in_dtype).itemsize
            return (0,), (-(-workspace_bytes(layer) // itemsize),), (M, K)

        def apply(
            self,
            output: Tensor,
            hidden_states: Tensor,
            w1: Tensor,
            w2: Tensor,
            topk_weights: Tensor,
            topk_ids: Tensor,
            activation,
            global_num_experts: int,
            expert_map: Tensor | None,
            a1q_scale: Tensor | None,
            a2_scale: Tensor | None,
            workspace13: Tensor,
            workspace2: Tensor,
            expert_tokens_meta,
            apply_router_weight_on_input: bool,
        ) -> None:
            if apply_router_weight_on_input:  # vLLM's prepare has multiplied the rows
                topk_weights = torch.ones_like(topk_weights)
            if expert_map is not None:
                topk_ids = torch.where(topk_ids < 0, -1, expert_map[topk_ids.clamp(min=0)])
            result = torch.ops.moe.fused_deepgemm(
                hidden_states,
                topk_weights,
                topk_ids,
                **weights(OP, w1, self.w1_scale, w2, self.w2_scale, self.block_shape),
                **self._formula(activation),
                w13_bias=self.w1_bias,
                w2_bias=self.w2_bias,
                num_experts=global_num_experts,
                workspace=workspace2.view(torch.uint8),
            )
            output.copy_(result)

        def _formula(self, activation) -> dict[str, float | None]:
            given = self.activation_config
            if activation == activations.SILU:
                return dict(swiglu_limit=given.clamp_limit)
            fix = "Use vLLM's own experts for this model."
            one = activation == activations.SWIGLUOAI_UNINTERLEAVE and given.beta == 1
            rule = "silu, or swigluoai_uninterleave with beta 1"
            check.value(one, OP, "activation", rule, f"{activation.value}, beta {given.beta}", fix)
            return dict(gemm1_alpha=given.alpha, gemm1_clamp_limit=given.clamp_limit)

    return MoeOpsExperts


@cache
def config_class() -> Any:
    """MoeOpsConfig, a vLLM quantization config: vLLM's fp8, or nothing, with other experts."""
    (base,) = _vllm(f"{_LAYERS}.quantization.fp8", "Fp8Config")
    routed, unquantized = _vllm(f"{_LAYERS}.fused_moe", "RoutedExperts", "UnquantizedFusedMoEMethod")
    linear, plain = _vllm(f"{_LAYERS}.linear", "LinearBase", "UnquantizedLinearMethod")

    class MoeOpsConfig(base):
        def __init__(self, *fp8, **given):
            super().__init__(*fp8, **given)
            self.quantised = bool(fp8 or given)  # vLLM passes nothing for a checkpoint without a quantization

        @classmethod
        def get_name(cls) -> str:
            return NAME

        def get_quant_method(self, layer, prefix: str):
            if self.quantised:
                method = super().get_quant_method(layer, prefix)
            elif isinstance(layer, routed):
                method = unquantized(layer.moe_config)
            else:
                method = plain() if isinstance(layer, linear) else None
            if isinstance(layer, routed):
                _take_over(method, layer)
            return method

    return MoeOpsConfig


def _take_over(method, layer) -> None:
    """Puts our experts into one of vLLM's methods, with the backend whose weights stay as they were loaded.

    Raises:
        NotImplementedError: these experts do not run in moe_ops; vLLM's reason is in the sentence.
    """
    (unquantized,) = _vllm(f"{_LAYERS}.fused_moe", "UnquantizedFusedMoEMethod")
    experts, keys = experts_class(), (None, None)
    if isinstance(method, unquantized):
        (backends,) = _vllm(f"{_LAYERS}.fused_moe.oracle.unquantized", "UnquantizedMoeBackend")
        method.unquantized_backend = backends.TRITON
    else:
        block, got = getattr(method, "moe_block_shape", None), type(method).__name__
        fix = "Leave quantization to vLLM for this checkpoint."
        if block is None or tuple(block) != (128, 128):
            got = f"{got} with blocks {block}"
            raise NotImplementedError(check.sentence(OP, "the experts", "bf16, or fp8 in 128 x 128 blocks", got, fix))
        keys = _vllm(f"{_LAYERS}.quantization.utils.quant_utils", "kFp8Static128BlockSym", "kFp8Dynamic128Sym")
        (backends,) = _vllm(f"{_LAYERS}.fused_moe.oracle.fp8", "Fp8MoeBackend")
        method.fp8_backend = backends.TRITON
    moe = layer.moe_config
    good, reason = experts.is_supported_config(experts, moe, *keys, moe.activation_format)
    if not good:
        fix = "Leave out quantization='moe_ops' for this model."
        raise NotImplementedError(check.sentence(OP, "the experts", "ones that moe_ops runs", reason, fix))
    method.experts_cls = experts


def _device() -> str:
    return arch_of(OP, here())


def _vllm(module: str, *names: str) -> list[Any]:
    return imported(OP, "vllm 0.34", module, *names)
