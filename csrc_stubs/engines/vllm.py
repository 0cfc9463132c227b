"""Stands in for vLLM 0.34.0."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import Enum
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

_LAYERS = "vllm.model_executor.layers"
MODULES = {
    f"{_LAYERS}.fused_moe.modular_kernel": (
        "FusedMoEActivationFormat",
        "FusedMoEExperts",
        "FusedMoEExpertsModular",
        "TopKWeightAndReduce",
    ),
    f"{_LAYERS}.fused_moe.topk_weight_and_reduce": ("TopKWeightAndReduceNoOP",),
    f"{_LAYERS}.fused_moe.activation": ("MoEActivation", "ApplyMoEActivationConfig"),
    f"{_LAYERS}.fused_moe.oracle.unquantized": ("UnquantizedMoeBackend",),
    f"{_LAYERS}.fused_moe.oracle.fp8": ("Fp8MoeBackend",),
    f"{_LAYERS}.fused_moe": ("RoutedExperts", "UnquantizedFusedMoEMethod"),
    f"{_LAYERS}.linear": ("LinearBase", "UnquantizedLinearMethod"),
    f"{_LAYERS}.quantization": ("register_quantization_config",),
    f"{_LAYERS}.quantization.base_config": ("QuantizationConfig",),
    f"{_LAYERS}.quantization.fp8": ("Fp8Config", "Fp8MoEMethod"),
    f"{_LAYERS}.quantization.utils.quant_utils": ("kFp8Static128BlockSym", "kFp8Dynamic128Sym"),
}

kFp8Static128BlockSym, kFp8Dynamic128Sym = "static 128x128", "dynamic 1x128"


class FusedMoEActivationFormat(Enum):
    Standard = ("standard",)
    BatchedExperts = ("batched_experts",)
    PaddedStandard = ("padded_standard",)

    def is_superset(self, pf_format: "FusedMoEActivationFormat") -> bool:
        return pf_format in (self, FusedMoEActivationFormat.Standard) and self.name != "BatchedExperts"


class MoEActivation(Enum):
    SILU = "silu"
    GELU = "gelu"
    SWIGLUOAI = "swigluoai"
    SWIGLUOAI_UNINTERLEAVE = "swigluoai_uninterleave"

    @property
    def is_gated(self) -> bool:
        return True


class UnquantizedMoeBackend(Enum):
    TRITON = "TRITON"
    CPU = "CPU"


class Fp8MoeBackend(Enum):
    TRITON = "TRITON"
    DEEPGEMM = "DEEPGEMM"


@dataclass(frozen=True)
class ApplyMoEActivationConfig:
    clamp_limit: float | None = None
    alpha: float = 1.0
    beta: float = 0.0


class TopKWeightAndReduce(ABC):
    @abstractmethod
    def apply(
        self,
        output: Tensor | None,
        fused_expert_output: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        apply_router_weight_on_input: bool,
    ) -> Tensor: ...


class TopKWeightAndReduceNoOP(TopKWeightAndReduce):
    def apply(self, output, fused_expert_output, topk_weights, topk_ids, apply_router_weight_on_input):
        if output is None or output is fused_expert_output:
            return fused_expert_output
        return output.copy_(fused_expert_output)


class FusedMoEExperts(ABC):
    def __init__(self, moe_config, quant_config, max_num_tokens: int | None = None, num_dispatchers: int | None = None):
        self.moe_config, self.quant_config = moe_config, quant_config
        given = (quant_config.gemm1_clamp_limit, quant_config.gemm1_alpha, quant_config.gemm1_beta)
        clamp_limit, alpha, beta = given
        self.activation_config = ApplyMoEActivationConfig(
            clamp_limit, 1.0 if alpha is None else alpha, 0.0 if beta is None else beta
        )

    @property
    def expects_unquantized_inputs(self) -> bool:
        return False

    @staticmethod
    @abstractmethod
    def activation_format() -> FusedMoEActivationFormat: ...

    @staticmethod
    def is_supported_config(cls, moe_config, weight_key, activation_key, activation_format):  # type: ignore[misc]
        if not cls._supports_current_device():
            return False, "kernel does not support current device"
        if not cls._supports_activation(moe_config.activation):
            return False, f"kernel does not support {moe_config.activation} activation"
        if not cls._supports_quant_scheme(weight_key, activation_key):
            return False, f"kernel does not support quantization scheme {weight_key}x{activation_key}"
        if not cls._supports_parallel_config(moe_config.moe_parallel_config):
            return False, "kernel does not support parallel config"
        if not cls.activation_format().is_superset(activation_format):
            return False, f"kernel does not support {activation_format.value} activation format"
        return True, None

    @staticmethod
    @abstractmethod
    def _supports_current_device() -> bool: ...

    @staticmethod
    @abstractmethod
    def _supports_no_act_and_mul() -> bool: ...

    @staticmethod
    @abstractmethod
    def _supports_quant_scheme(weight_key, activation_key) -> bool: ...

    @staticmethod
    @abstractmethod
    def _supports_activation(activation: MoEActivation) -> bool: ...

    @staticmethod
    @abstractmethod
    def _supports_parallel_config(moe_parallel_config) -> bool: ...

    @property
    def quant_dtype(self):
        return self.quant_config.quant_dtype

    @property
    def block_shape(self):
        return self.quant_config.block_shape

    @property
    def w1_scale(self):
        return self.quant_config.w1_scale

    @property
    def w2_scale(self):
        return self.quant_config.w2_scale

    @property
    def w1_bias(self):
        return self.quant_config.w1_bias

    @property
    def w2_bias(self):
        return self.quant_config.w2_bias


class FusedMoEExpertsModular(FusedMoEExperts):
    @staticmethod
    def is_monolithic() -> bool:
        return False

    def workspace_dtype(self, act_dtype: torch.dtype) -> torch.dtype:
        return act_dtype

    @abstractmethod
    def workspace_shapes(
        self,
        M: int,
        N: int,
        K: int,
        topk: int,
        global_num_experts: int,
        local_num_experts: int,
        expert_tokens_meta,
        activation: MoEActivation,
    ): ...

    @abstractmethod
    def finalize_weight_and_reduce_impl(self) -> TopKWeightAndReduce: ...

    @abstractmethod
    def apply(
        self,
        output: Tensor,
        hidden_states: Tensor,
        w1: Tensor,
        w2: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        activation: MoEActivation,
        global_num_experts: int,
        expert_map: Tensor | None,
        a1q_scale: Tensor | None,
        a2_scale: Tensor | None,
        workspace13: Tensor,
        workspace2: Tensor,
        expert_tokens_meta,
        apply_router_weight_on_input: bool,
    ): ...


class RoutedExperts(nn.Module):
    """vLLM's takes many arguments; the plug-in reads moe_config alone."""

    moe_config: Any


class LinearBase(nn.Module):
    pass


class UnquantizedLinearMethod:
    pass


class UnquantizedFusedMoEMethod:
    def __init__(self, moe):
        self.moe, self.unquantized_backend, self.experts_cls = moe, UnquantizedMoeBackend.CPU, None


class Fp8MoEMethod:
    def __init__(self, quant_config, layer: RoutedExperts):
        self.moe, self.quant_config = layer.moe_config, quant_config
        self.moe_block_shape = quant_config.weight_block_size
        self.fp8_backend, self.experts_cls = Fp8MoeBackend.DEEPGEMM, None


QUANTIZATIONS: dict[str, type] = {}


def register_quantization_config(quantization: str):
    def register(config):
        QUANTIZATIONS[quantization] = config
        return config

    return register


class QuantizationConfig(ABC):
    @staticmethod
    @abstractmethod
    def get_config_filenames() -> list[str]: ...

    @classmethod
    @abstractmethod
    def from_config(cls, config: dict[str, Any]) -> "QuantizationConfig": ...

    @classmethod
    def override_quantization_method(cls, hf_quant_cfg: dict[str, Any], user_quant: str | None, hf_config: Any = None):
        return None

    @abstractmethod
    def get_quant_method(self, layer: nn.Module, prefix: str): ...


class Fp8Config(QuantizationConfig):
    def __init__(
        self,
        is_checkpoint_fp8_serialized: bool = True,
        activation_scheme: str = "dynamic",
        ignored_layers: list[str] | None = None,
        weight_block_size: list[int] | None = None,
        store_dtype: str | None = None,
    ):
        self.ignored_layers, self.weight_block_size = ignored_layers or [], weight_block_size

    @classmethod
    def get_name(cls) -> str:
        return "fp8"

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "Fp8Config":
        return cls(is_checkpoint_fp8_serialized=True, weight_block_size=config.get("weight_block_size"))

    @classmethod
    def get_config_filenames(cls) -> list[str]:
        return []

    def get_quant_method(self, layer: nn.Module, prefix: str):
        if isinstance(layer, RoutedExperts):
            skipped = prefix in self.ignored_layers
            return UnquantizedFusedMoEMethod(layer.moe_config) if skipped else Fp8MoEMethod(self, layer)
        return SimpleNamespace(name="Fp8LinearMethod") if isinstance(layer, LinearBase) else None
