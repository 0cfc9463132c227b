"""Stands in for SGLang 0.5.23."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import Tensor

_SRT = "sglang.srt"
MODULES = {
    f"{_SRT}.layers.moe.moe_runner.base": ("DispatchMoeRunnerCore", "MoeRunnerConfig"),
    f"{_SRT}.layers.moe.moe_runner.runner": ("register_moe_runner_core", "MoeRunner"),
    f"{_SRT}.layers.moe.moe_runner.triton": ("TritonMoeQuantInfo",),
    f"{_SRT}.layers.moe.token_dispatcher.standard": ("StandardDispatchOutput", "StandardCombineInput"),
    f"{_SRT}.layers.moe.topk": ("StandardTopKOutput",),
    f"{_SRT}.layers.moe.utils": ("resolve_moe_runner_backend", "get_moe_runner_backend"),
    f"{_SRT}.layers.quantization.unquant": ("UnquantizedFusedMoEMethod",),
    f"{_SRT}.layers.quantization.fp8": ("Fp8MoEMethod",),
    f"{_SRT}.plugins.hook_registry": ("HookRegistry", "HookType"),
    f"{_SRT}.server_args": ("add_moe_runner_backend_choices",),
}

CHOICES = ["auto", "triton"]
asked = "triton"
"""What --moe-runner-backend says."""


@dataclass(frozen=True)
class RegisteredMoeRunnerBackend:
    value: str


def add_moe_runner_backend_choices(iterable, /) -> None:
    CHOICES.extend(iterable)


def resolve_moe_runner_backend(backend):
    if backend not in CHOICES:
        raise ValueError(f"MoE runner backend {backend!r} is neither built in nor registered")
    return RegisteredMoeRunnerBackend(backend)


def get_moe_runner_backend() -> RegisteredMoeRunnerBackend:
    return resolve_moe_runner_backend(asked)


@dataclass
class MoeRunnerConfig:
    num_experts: int | None = None
    num_local_experts: int | None = None
    hidden_size: int | None = None
    intermediate_size_per_partition: int | None = None
    layer_id: int | None = None
    top_k: int | None = None
    num_fused_shared_experts: int | None = None
    params_dtype: torch.dtype | None = None
    routing_method_type: Any = None
    runner_backend: Any = None
    activation: str = "silu"
    is_gated: bool = True
    apply_router_weight_on_input: bool = False
    inplace: bool = True
    no_combine: bool = False
    no_combine_keep_router_weight: bool = False
    routed_scaling_factor: float | None = None
    gemm1_alpha: float | None = None
    gemm1_beta: float | None = None
    gemm1_clamp_limit: float | None = None
    swiglu_limit: float | None = None
    gate_up_interleaved: bool = True
    layer: Any = None
    use_tp_all_gather_activation: bool = False
    silu_mul_keep_fp32: bool = False


@dataclass
class TritonMoeQuantInfo:
    w13_weight: Tensor
    w2_weight: Tensor
    b13: Tensor | None = None
    b2: Tensor | None = None
    use_mxfp8: bool = False
    use_fp8_w8a8: bool = False
    use_int8_w8a8: bool = False
    use_int8_w8a16: bool = False
    use_int4_w4a16: bool = False
    per_channel_quant: bool = False
    w13_scale: Tensor | None = None
    w2_scale: Tensor | None = None
    w13_zp: Tensor | None = None
    w2_zp: Tensor | None = None
    a13_scale: Tensor | None = None
    a2_scale: Tensor | None = None
    block_shape: list[int] | None = None
    fuse_swiglu_interleaved: bool = False


class StandardTopKOutput(NamedTuple):
    topk_weights: Tensor
    topk_ids: Tensor
    router_logits: Tensor


class StandardDispatchOutput(NamedTuple):
    hidden_states: Tensor
    hidden_states_scale: Tensor | None
    topk_output: StandardTopKOutput
    hidden_states_pre_quant: tuple | None = None


class StandardCombineInput(NamedTuple):
    hidden_states: Tensor


class DispatchMoeRunnerCore(ABC):
    def __init__(self, config: MoeRunnerConfig):
        self.config = config

    @property
    @abstractmethod
    def runner_backend(self): ...

    @abstractmethod
    def run_from_dispatch(self, dispatch_output, quant_info, runner_config: MoeRunnerConfig, hooks: Any = None): ...


FACTORIES: dict[str, Any] = {}


def register_moe_runner_core(backend_name: str, factory) -> None:
    if backend_name in FACTORIES:
        raise ValueError(f"Runner core for {backend_name!r} is already registered")
    FACTORIES[backend_name] = factory


class MoeRunner:
    def __init__(self, runner_backend, config: MoeRunnerConfig, lora_enabled: bool = False):
        self.runner_backend, self.config = runner_backend, config
        self.runner_core = FACTORIES[runner_backend.value](config)

    def run(self, dispatch_output, quant_info, lora_info=None):
        return self.runner_core.run_from_dispatch(dispatch_output, quant_info, self.config, hooks=None)


class UnquantizedFusedMoEMethod:
    def create_moe_runner(self, layer, moe_runner_config: MoeRunnerConfig):
        self.runner = None

    def apply(self, layer, dispatch_output):
        return "SGLang's own"

    def get_triton_quant_info(self, layer) -> TritonMoeQuantInfo:
        return TritonMoeQuantInfo(layer.w13_weight, layer.w2_weight)


class Fp8MoEMethod(UnquantizedFusedMoEMethod):
    def create_moe_runner(self, layer, moe_runner_config: MoeRunnerConfig):
        self.runner = None

    def apply(self, layer, dispatch_output):
        return "SGLang's own"

    def get_triton_quant_info(self, layer) -> TritonMoeQuantInfo:
        scales = dict(w13_scale=layer.w13_weight_scale_inv, w2_scale=layer.w2_weight_scale_inv)
        return TritonMoeQuantInfo(
            layer.w13_weight, layer.w2_weight, use_fp8_w8a8=True, **scales, block_shape=[128, 128]
        )


class HookType(Enum):
    BEFORE = "before"
    AFTER = "after"
    AROUND = "around"
    REPLACE = "replace"


class HookRegistry:
    _hooks: dict[str, Any] = {}

    @classmethod
    def register(cls, target: str, hook, hook_type: HookType = HookType.AFTER, *, source=None):
        assert hook_type is HookType.AROUND
        cls._hooks[target] = hook

    @classmethod
    def apply_hooks(cls):
        """AROUND alone, on the classes of this file."""
        for target, hook in cls._hooks.items():
            kind, method = target.split(".")[-2:]
            owner, original = globals()[kind], getattr(globals()[kind], method)
            setattr(owner, method, lambda *args, _o=original, _h=hook, **kwargs: _h(_o, *args, **kwargs))
        cls._hooks.clear()
