"""moe_ops in SGLang: its entry point of the group sglang.srt.plugins adds an MoE runner named "moe_ops".

    python -m sglang.launch_server --model-path Qwen/Qwen3-30B-A3B --moe-runner-backend moe_ops

It takes bf16 experts, and fp8 ones in 128 x 128 blocks, as SGLang loads them, in the standard dispatch format (no
all-to-all backend; tensor and expert parallel). Nothing changes for a server that does not ask. Read off SGLang 0.5.23.
"""

from functools import cache
from typing import Any

import torch

from moe_ops import check
from moe_ops.integrations.engines import imported, weights

NAME = "moe_ops"
"""What --moe-runner-backend calls it."""

OP = "moe_ops.integrations.sglang"
_SRT = "sglang.srt"
_METHODS = {"unquant": "UnquantizedFusedMoEMethod", "fp8": "Fp8MoEMethod"}
"""Module of SGLang's quantization -> its class, whose experts can run here."""


def register() -> None:
    """Makes --moe-runner-backend moe_ops known. SGLang calls it in each of its processes.

    SGLang's methods build runners for the backends that they know by name; a hook around them builds ours.

    Raises:
        ImportError: this SGLang has no runner cores to register. (SGLang logs what a plug-in raises and goes on.)
    """
    (register_core,) = _sglang("layers.moe.moe_runner.runner", "register_moe_runner_core")
    (add_choices,) = _sglang("server_args", "add_moe_runner_backend_choices")
    hooks, kinds = _sglang("plugins.hook_registry", "HookRegistry", "HookType")
    register_core(NAME, core_class())
    add_choices([NAME])
    for module, name in _METHODS.items():
        method = f"{_SRT}.layers.quantization.{module}.{name}"
        hooks.register(f"{method}.create_moe_runner", _create_runner, kinds.AROUND)
        hooks.register(f"{method}.apply", _apply, kinds.AROUND)


@cache
def core_class() -> Any:
    """MoeOpsRunnerCore, a DispatchMoeRunnerCore."""
    (base,) = _sglang("layers.moe.moe_runner.base", "DispatchMoeRunnerCore")
    (combine_input,) = _sglang("layers.moe.token_dispatcher.standard", "StandardCombineInput")
    (resolve,) = _sglang("layers.moe.utils", "resolve_moe_runner_backend")

    class MoeOpsRunnerCore(base):
        """From dispatched tokens to combined ones in one op."""

        def __init__(self, config):
            super().__init__(config)
            formula(config)

        @property
        def runner_backend(self):
            return resolve(NAME)

        def run_from_dispatch(self, dispatch_output, quant_info, runner_config, hooks=None):
            """Weights: SGLang's TritonMoeQuantInfo. Ids are local, -1 for other ranks'."""
            fix = "Run without LoRA, and with the standard dispatcher."
            for name, value in (("hooks", hooks), ("hidden_states_scale", dispatch_output.hidden_states_scale)):
                check.value(value is None, OP, name, "None", type(value).__name__, fix)
            topk = dispatch_output.topk_output
            out = torch.ops.moe.fused_deepgemm(
                dispatch_output.hidden_states,
                topk.topk_weights,
                topk.topk_ids,
                **weights(
                    OP,
                    quant_info.w13_weight,
                    quant_info.w13_scale,
                    quant_info.w2_weight,
                    quant_info.w2_scale,
                    quant_info.block_shape,
                ),
                **formula(runner_config),
                w13_bias=quant_info.b13,
                w2_bias=quant_info.b2,
                num_experts=-1 if runner_config.num_experts is None else runner_config.num_experts,
            )
            return combine_input(hidden_states=out)

    return MoeOpsRunnerCore


def formula(config) -> dict[str, Any]:
    """A MoeRunnerConfig's activation and scaling as arguments of fused_deepgemm.

    Raises:
        ValueError: what no formula of ours is, or a form of the result that fused_deepgemm does not give.
    """
    fix = "Choose another --moe-runner-backend."
    fine = config.activation == "silu" and config.is_gated
    check.value(fine, OP, "activation", "silu with a gate", f"{config.activation}, gated: {config.is_gated}", fix)
    for name in ("apply_router_weight_on_input", "no_combine"):
        check.value(not getattr(config, name), OP, name, "off", "on", fix)
    if config.gemm1_alpha is None:
        limit = config.swiglu_limit if config.gemm1_clamp_limit is None else config.gemm1_clamp_limit
        form = dict(swiglu_limit=limit)
    else:
        laid = "gate rows over up rows"
        check.value(not config.gate_up_interleaved, OP, "w13", laid, "rows that take turns", fix)
        check.value(config.gemm1_beta in (None, 1), OP, "gemm1_beta", "1", config.gemm1_beta, fix)
        form = dict(gemm1_alpha=config.gemm1_alpha, gemm1_clamp_limit=config.gemm1_clamp_limit)
    factor = config.routed_scaling_factor
    return form | dict(routed_scaling_factor=1.0 if factor is None else factor)


def _create_runner(create, method, layer, config):
    create(method, layer, config)
    (asked,) = _sglang("layers.moe.utils", "get_moe_runner_backend")
    if asked().value == NAME:
        (runner,) = _sglang("layers.moe.moe_runner.runner", "MoeRunner")
        method.runner = runner(asked(), config)


def _apply(apply, method, layer, dispatch_output):
    runner = method.runner
    if runner is None or runner.runner_backend.value != NAME:
        return apply(method, layer, dispatch_output)
    return runner.run(dispatch_output, method.get_triton_quant_info(layer))


def _sglang(module: str, *names: str) -> list[Any]:
    return imported(OP, "sglang 0.5.23", f"{_SRT}.{module}", *names)
