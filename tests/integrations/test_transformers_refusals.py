"""What the integration refuses, in which words."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("transformers", reason="needs transformers (pip install 'fused-moe-ops[hf]')")

from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts  # noqa: E402
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts  # noqa: E402
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts  # noqa: E402

from moe_ops.integrations.transformers import prepare  # noqa: E402
from moe_ops.testing import random_routing  # noqa: E402
from moe_ops.testing.small_models import ExpertsConfig, filled, fp8_experts, small_model  # noqa: E402

E, K, I = 4, 128, 256


def config(**given):
    return ExpertsConfig(E=E, K=K, I=I, **given)


def routed():
    weights, ids = random_routing(7, E, 2, "uniform", torch.Generator().manual_seed(1))
    return torch.randn(7, K), ids.long(), weights


def run(module):
    module.config._experts_implementation = "moe_ops"
    with torch.no_grad():
        return module(*routed())


class Odd(torch.nn.Parameter):
    """Stands for another library's quantised parameter."""


def refusals():
    """name, (function, error, sentence)"""

    def gradients():
        filled(Qwen3MoeExperts(config(implementation="moe_ops"))).requires_grad_(True)(*routed())

    def another_implementation():
        module = filled(Qwen3MoeExperts(config()))
        prepare(module, "fp8_block", progress=False)
        module(*routed())

    def saving():
        model = small_model("qwen3_moe")
        prepare(model, "fp8_block", progress=False)
        model.state_dict()

    def another_recipe():
        module = filled(Qwen3MoeExperts(config()))
        prepare(module, "fp8_block", progress=False)
        prepare(module, "mxfp4", progress=False)

    def no_experts():
        prepare(torch.nn.Linear(2, 2), progress=False)

    def unknown_recipe():
        prepare(filled(Qwen3MoeExperts(config())), "int4", progress=False)

    def meta():
        run(Qwen3MoeExperts(config()).to("meta"))

    def offloaded():
        module = filled(Qwen3MoeExperts(config()))
        module._hf_hook = SimpleNamespace(offload=True)
        run(module)

    def exporting():
        module = filled(GptOssExperts(config()))
        module.config._experts_implementation = "moe_ops"
        torch.export.export(module, routed())

    def foreign_parameter():
        module = filled(Qwen3MoeExperts(config()))
        module.gate_up_proj = Odd(module.gate_up_proj.to(torch.uint8), requires_grad=False)
        run(module)

    def static_scales():
        run(fp8_experts(config(), activation_scheme="static"))

    def block_across_halves():
        module = fp8_experts(config())
        module.gate_up_proj = torch.nn.Parameter(module.gate_up_proj[:, :384].clone(), False)
        module.gate_up_proj_scale_inv = torch.nn.Parameter(torch.ones(E, 3, 1), False)
        module.down_proj = torch.nn.Parameter(module.down_proj[:, :, :192].clone(), False)
        run(module)

    def ungated_quantised():
        prepare(filled(NemotronHExperts(config())), "fp8_block", progress=False)

    def cast_after_the_first_forward():
        module = filled(Qwen3MoeExperts(config())).bfloat16()
        run(module)
        run(module.half())

    return [
        (gradients, RuntimeError, "Qwen3MoeExperts must not ask for gradients; got parameters that do."),
        (another_implementation, RuntimeError, "must not be read; it was freed when the experts were prepared for fp8"),
        (saving, RuntimeError, r"mlp.experts.\* must not be saved; its weights are prepared for fp8_block"),
        (another_recipe, ValueError, "recipe of  must be fp8_block; got mxfp4. It is prepared already"),
        (no_experts, ValueError, "model must be one with experts of transformers' interface; got Linear without any."),
        (unknown_recipe, ValueError, "recipe must be one of bf16, fp8_block, mxfp8, mxfp4; got 'int4'"),
        (meta, ValueError, "gate_up_proj of Qwen3MoeExperts must be in memory; got a tensor without data"),
        (offloaded, ValueError, "weights of Qwen3MoeExperts must be in memory for good; got offloaded ones"),
        (exporting, ValueError, r"before torch.export, call prepare\(model\)"),
        (foreign_parameter, TypeError, "gate_up_proj of Qwen3MoeExperts must be a plain tensor; got Odd."),
        (static_scales, NotImplementedError, "activation_scheme of FP8Experts must be dynamic; got static."),
        (block_across_halves, ValueError, "must be of shape .* A block must not lie across the gate and the up half."),
        (ungated_quantised, NotImplementedError, "must be bf16, or the form that the weights have"),
        (cast_after_the_first_forward, TypeError, "w13 must be bfloat16; got float16."),
    ]


@pytest.mark.parametrize("bad, error, sentence", refusals(), ids=lambda value: getattr(value, "__name__", ""))
def test_transformers_explains_itself(bad, error, sentence):
    with pytest.raises(error, match=sentence):
        bad()
