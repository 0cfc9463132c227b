"""The vLLM plug-in, against a stand-in with vLLM's signatures, and against vLLM where it is installed."""

from math import prod
from types import SimpleNamespace

import pytest
import torch

from moe_ops.csrc_stubs.engines import vllm as stub
from moe_ops.csrc_stubs.engines.cases import TOP_K, E, I, K, engine, installed, kinds, layer, module, routed
from moe_ops.integrations import vllm
from moe_ops.planner import plan
from moe_ops.recipes import RECIPES
from moe_ops.reference.moe import moe
from moe_ops.testing import relative_error

LAYERS = "vllm.model_executor.layers"


def vllm_engine(kind):
    return engine(stub, kind, vllm.experts_class, vllm.config_class)


def vllm_experts(recipe, tensors, biases=(None, None), **formula):
    """MoeOpsExperts as vLLM makes it. The stand-in's quant config has the names that vLLM's properties have."""
    quant = dict(quant_dtype=None, block_shape=None) if recipe == "bf16" else {}
    scales = dict(w1_scale=tensors[1], w2_scale=tensors[3], w1_bias=biases[0], w2_bias=biases[1])
    quant = dict(quant_dtype=torch.float8_e4m3fn, block_shape=[128, 128]) | quant | scales
    constants = dict.fromkeys(("gemm1_clamp_limit", "gemm1_alpha", "gemm1_beta")) | formula
    names = ("swiglu_limit", "swiglu_alpha", "swiglu_beta", "activation_situ_beta", "activation_situ_linear_beta")
    config = SimpleNamespace(in_dtype=torch.bfloat16, **dict.fromkeys(names))
    return vllm.experts_class()(config, SimpleNamespace(**quant, **constants))


def run_vllm(experts, x, weights, ids, w1, w2, activation="SILU", E_global=E, expert_map=None, on_input=False):
    """What vLLM's modular kernel does around experts: buffers by workspace_shapes, the output in the first of them."""
    activation = module(f"{LAYERS}.fused_moe.activation").MoEActivation[activation]
    sizes = (len(x), w1.shape[1], K, TOP_K, E_global, len(w1), None, activation)
    first, second, out_shape = experts.workspace_shapes(*sizes)
    common = torch.empty(max(prod(first), prod(out_shape)), dtype=x.dtype)
    out = common[: prod(out_shape)].view(out_shape)
    experts.apply(
        output=out,
        hidden_states=x,
        w1=w1,
        w2=w2,
        topk_weights=weights,
        topk_ids=ids,
        activation=activation,
        global_num_experts=E_global,
        expert_map=expert_map,
        a1q_scale=None,
        a2_scale=None,
        workspace13=common[: prod(first)].view(first),
        workspace2=torch.empty(second, dtype=x.dtype),
        expert_tokens_meta=None,
        apply_router_weight_on_input=on_input,
    )
    return out


@kinds("vllm")
@pytest.mark.parametrize("recipe", ["bf16", "fp8_block"])
@pytest.mark.parametrize(
    "activation, given, formula",
    [
        ("SILU", {}, {}),
        ("SILU", dict(gemm1_clamp_limit=0.7), dict(swiglu_limit=0.7)),
        (
            "SWIGLUOAI_UNINTERLEAVE",
            dict(gemm1_clamp_limit=0.9, gemm1_alpha=1.702, gemm1_beta=1.0),
            dict(gemm1_clamp_limit=0.9, gemm1_alpha=1.702),
        ),
    ],
    ids=["silu", "clamped", "oai"],
)
def test_vllm_experts_match_the_judge(kind, recipe, activation, given, formula):
    tensors, plain = layer(recipe)
    biases = torch.randn(E, 2 * I), torch.randn(E, K)
    x, weights, ids = routed()
    with vllm_engine(kind):
        experts = vllm_experts(recipe, tensors, biases, **given)
        got = run_vllm(experts, x, weights, ids, tensors[0], tensors[2], activation)
    want = moe(x, weights, ids, *plain, w13_bias=biases[0], w2_bias=biases[1], **formula)
    assert relative_error(got, want) < RECIPES[recipe].max_diff


@kinds("vllm")
def test_vllm_experts_of_other_ranks_and_padding_rows(kind):
    """expert_map is any map from global ids; rows whose ids are all -1 hold garbage, and come out zero."""
    (w13, _, w2, _), plain = layer("bf16")
    x, weights, ids = routed()
    ids[3:5], x[3:5] = -1, float("nan")
    mine = [7, 1, 3]  # the last among them: -1 must not index it
    expert_map = torch.full((E,), -1, dtype=torch.int32)
    expert_map[mine] = torch.arange(3, dtype=torch.int32)
    with vllm_engine(kind):
        experts = vllm_experts("bf16", (w13, None, w2, None))
        got = run_vllm(experts, x, weights, ids, w13[mine], w2[mine], expert_map=expert_map)
        whole = run_vllm(experts, x.nan_to_num(), weights, ids, w13, w2, on_input=True)
    local = torch.where(ids < 0, -1, expert_map[ids.clamp(min=0).long()])
    want = moe(x.nan_to_num(), weights, local, *(w[mine] for w in plain))
    assert relative_error(got, want) < RECIPES["bf16"].max_diff
    assert not got[3:5].any()
    want = moe(x.nan_to_num(), torch.ones_like(weights), ids, *plain)
    assert relative_error(whole, want) < RECIPES["bf16"].max_diff


@kinds("vllm")
def test_vllm_workspace_is_the_plan_s(kind):
    """As many bytes as the plan asks for, and never fewer for more tokens: vLLM locks what it measured at the most."""
    with vllm_engine(kind):
        experts = vllm_experts("fp8_block", layer("fp8_block")[0])
        shapes = [
            experts.workspace_shapes(M, 2 * I, K, TOP_K, E, E, None, None) for M in (1, 2, 7, 64, 300, 1000, 4096)
        ]
    for M, (first, second, out) in zip((1, 2, 7, 64, 300, 1000, 4096), shapes, strict=True):
        asked = plan(T=M, E=E, K=K, I=I, top_k=TOP_K, recipe="fp8_block").workspace_bytes
        assert (prod(first), out) == (0, (M, K)) and 0 <= 2 * second[0] - asked < 2
    assert [s[1] for s in shapes] == sorted(s[1] for s in shapes)


def test_vllm_config_hands_out_our_experts():
    routed_config = SimpleNamespace(
        activation=stub.MoEActivation.SILU,
        moe_parallel_config=None,
        activation_format=stub.FusedMoEActivationFormat.Standard,
    )
    with vllm_engine("stand-in"):
        vllm.register()
        config = stub.QUANTIZATIONS["moe_ops"]
        experts, linear = stub.RoutedExperts(), stub.LinearBase()
        experts.moe_config = routed_config
        plain = config()
        method = plain.get_quant_method(experts, "mlp.experts")
        assert isinstance(method, stub.UnquantizedFusedMoEMethod)
        assert (method.experts_cls, method.unquantized_backend.name) == (vllm.experts_class(), "TRITON")
        assert isinstance(plain.get_quant_method(linear, "q_proj"), stub.UnquantizedLinearMethod)
        assert plain.get_quant_method(torch.nn.Identity(), "attn") is None
        fp8 = config.from_config(dict(quant_method="fp8", weight_block_size=[128, 128]))
        method = fp8.get_quant_method(experts, "mlp.experts")
        assert isinstance(method, stub.Fp8MoEMethod)
        assert (method.experts_cls, method.fp8_backend.name) == (vllm.experts_class(), "TRITON")
        assert fp8.get_quant_method(linear, "q_proj").name == "Fp8LinearMethod"
        assert config.override_quantization_method({"quant_method": "fp8"}, "moe_ops") == "moe_ops"
        assert config.override_quantization_method({"quant_method": "fp8"}, None) is None
        assert config.override_quantization_method({"quant_method": "awq"}, "moe_ops") is None
        with pytest.raises(NotImplementedError, match="must be bf16, or fp8 in 128 x 128 blocks; got .*None"):
            config.from_config(dict(quant_method="fp8")).get_quant_method(experts, "mlp.experts")
        routed_config.activation = stub.MoEActivation.GELU
        with pytest.raises(NotImplementedError, match="ones that moe_ops runs; got kernel does not support .*GELU"):
            plain.get_quant_method(experts, "mlp.experts")
        routed_config.activation_format = stub.FusedMoEActivationFormat.BatchedExperts
        routed_config.activation = stub.MoEActivation.SILU
        with pytest.raises(NotImplementedError, match="batched_experts"):
            plain.get_quant_method(experts, "mlp.experts")


@installed("vllm")
@pytest.mark.parametrize("recipe", ["bf16", "fp8_block"])
def test_vllm_installed_kernel_runs_our_experts(recipe, monkeypatch):
    """vLLM's own prepare, workspace manager and finalize around them."""
    tensors, plain = layer(recipe)
    x, weights, ids = routed()
    with vllm_engine("installed"):
        moe_layers, activation = f"{LAYERS}.fused_moe", module(f"{LAYERS}.fused_moe.activation").MoEActivation.SILU
        monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: None)  # the manager's, which wants a card
        module("vllm.v1.worker.workspace").init_workspace_manager(torch.device("cpu"))
        prepare = module(f"{moe_layers}.prepare_finalize.no_dp_ep").MoEPrepareAndFinalizeNoDPEPModular()
        quant = module(f"{moe_layers}.config")
        if recipe == "bf16":
            quant = quant.FusedMoEQuantConfig.make()
        else:
            quant = quant.fp8_w8a8_moe_quant_config(tensors[1], tensors[3], block_shape=[128, 128])
        moe_config = vllm_experts(recipe, tensors).moe_config
        moe_config.moe_parallel_config = None
        experts = vllm.experts_class()(moe_config, quant)
        kernel = module(f"{moe_layers}.modular_kernel").FusedMoEKernel(prepare, experts)
        got = kernel.apply(
            x,
            tensors[0],
            tensors[2],
            topk_weights=weights,
            topk_ids=ids,
            activation=activation,
            global_num_experts=E,
            expert_map=None,
            apply_router_weight_on_input=False,
        )
    assert relative_error(got, moe(x, weights, ids, *plain)) < RECIPES[recipe].max_diff


@installed("vllm")
def test_vllm_installed_registers_the_quantization():
    with vllm_engine("installed"):
        vllm.register()
        quantization = module(f"{LAYERS}.quantization")
        assert "moe_ops" in quantization.QUANTIZATION_METHODS
        config = quantization.get_quantization_config("moe_ops")
        fp8 = dict(quant_method="fp8", activation_scheme="dynamic", weight_block_size=[128, 128])
        assert config.from_config(fp8).quantised and not config().quantised
        assert all(type(made) is vllm.config_class() for made in (config(), config.from_config(fp8)))
        assert config.override_quantization_method(fp8, "moe_ops") == "moe_ops" and config().get_name() == "moe_ops"
