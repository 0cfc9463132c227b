"""The SGLang plug-in, against a stand-in with SGLang's signatures, and against SGLang where it is installed."""

from types import SimpleNamespace

import pytest
import torch

from moe_ops.csrc_stubs.engines import sglang as stub
from moe_ops.csrc_stubs.engines.cases import E, I, K, engine, installed, kinds, layer, module, routed
from moe_ops.integrations import sglang
from moe_ops.recipes import RECIPES
from moe_ops.reference.moe import moe
from moe_ops.testing import relative_error

SRT = "sglang.srt"


def sglang_engine(kind):
    return engine(stub, kind, sglang.core_class)


def sglang_call(recipe, tensors, x, weights, ids, biases=(None, None), **config):
    base = module(f"{SRT}.layers.moe.moe_runner.base")
    standard = module(f"{SRT}.layers.moe.token_dispatcher.standard")
    fp8 = {} if recipe == "bf16" else dict(w13_scale=tensors[1], w2_scale=tensors[3], block_shape=[128, 128])
    info = module(f"{SRT}.layers.moe.moe_runner.triton").TritonMoeQuantInfo
    info = info(tensors[0], tensors[2], b13=biases[0], b2=biases[1], use_fp8_w8a8=recipe != "bf16", **fp8)
    config = base.MoeRunnerConfig(num_experts=E, num_local_experts=E, **config)
    topk = module(f"{SRT}.layers.moe.topk").StandardTopKOutput(weights, ids, None)
    core = sglang.core_class()(config)
    return core.run_from_dispatch(standard.StandardDispatchOutput(x, None, topk), info, config).hidden_states


@kinds("sglang")
@pytest.mark.parametrize("recipe", ["bf16", "fp8_block"])
@pytest.mark.parametrize(
    "given, formula",
    [
        ({}, {}),
        (dict(routed_scaling_factor=2.5, swiglu_limit=0.7), dict(routed_scaling_factor=2.5, swiglu_limit=0.7)),
        (
            dict(gemm1_alpha=1.702, gemm1_clamp_limit=0.9, gate_up_interleaved=False),
            dict(gemm1_alpha=1.702, gemm1_clamp_limit=0.9),
        ),
    ],
    ids=["silu", "clamped-scaled", "oai"],
)
def test_sglang_runner_matches_the_judge(kind, recipe, given, formula):
    tensors, plain = layer(recipe)
    biases = torch.randn(E, 2 * I), torch.randn(E, K)
    x, weights, ids = routed()
    ids[:5, 0] = -1
    before = x.clone()
    with sglang_engine(kind):
        got = sglang_call(recipe, tensors, x, weights, ids, biases, **given)
    want = moe(x, weights, ids, *plain, w13_bias=biases[0], w2_bias=biases[1], **formula)
    assert relative_error(got, want) < RECIPES[recipe].max_diff
    assert torch.equal(x, before)


@kinds("sglang")
@pytest.mark.parametrize(
    "config, sentence",
    [
        (dict(activation="gelu"), "activation must be silu with a gate; got gelu"),
        (dict(is_gated=False), "got silu, gated: False"),
        (dict(no_combine=True), "no_combine must be off"),
        (dict(apply_router_weight_on_input=True), "apply_router_weight_on_input must be off"),
        (dict(gemm1_alpha=1.7), "w13 must be gate rows over up rows"),
    ],
)
def test_sglang_refuses_when_the_runner_is_made(kind, config, sentence):
    with sglang_engine(kind), pytest.raises(ValueError, match=sentence):
        sglang.core_class()(module(f"{SRT}.layers.moe.moe_runner.base").MoeRunnerConfig(**config))


@pytest.mark.parametrize("method", ["UnquantizedFusedMoEMethod", "Fp8MoEMethod"])
def test_sglang_methods_use_the_runner_that_was_asked_for(monkeypatch, method):
    """As SGLang does it: plug-in, hooks, then a method builds its runner and applies it."""
    for name in ("UnquantizedFusedMoEMethod", "Fp8MoEMethod"):
        for function in ("create_moe_runner", "apply"):  # the hooks change them; monkeypatch puts them back
            monkeypatch.setattr(getattr(stub, name), function, getattr(getattr(stub, name), function))
    monkeypatch.setattr(stub, "CHOICES", ["auto", "triton"])
    monkeypatch.setattr(stub, "FACTORIES", {})
    recipe = "bf16" if method.startswith("Un") else "fp8_block"
    (w13, w13_scale, w2, w2_scale), plain = layer(recipe)
    experts = SimpleNamespace(
        w13_weight=w13, w2_weight=w2, w13_weight_scale_inv=w13_scale, w2_weight_scale_inv=w2_scale
    )
    x, weights, ids = routed()
    dispatched = stub.StandardDispatchOutput(x, None, stub.StandardTopKOutput(weights, ids, x))
    with sglang_engine("stand-in"):
        sglang.register()
        stub.HookRegistry.apply_hooks()
        made = getattr(stub, method)()
        made.create_moe_runner(experts, stub.MoeRunnerConfig())
        assert made.apply(experts, dispatched) == "SGLang's own"
        monkeypatch.setattr(stub, "asked", "moe_ops")
        made.create_moe_runner(experts, stub.MoeRunnerConfig())
        got = made.apply(experts, dispatched).hidden_states
        assert made.runner.runner_core.runner_backend.value == "moe_ops"
    assert relative_error(got, moe(x, weights, ids, *plain)) < RECIPES[recipe].max_diff


@installed("sglang")
def test_sglang_installed_registers_and_runs_our_core(monkeypatch):
    (tensors, plain), (x, weights, ids) = layer("bf16"), routed()
    with sglang_engine("installed"):
        registry = module(f"{SRT}.plugins.hook_registry").HookRegistry
        sglang.register()
        registry.apply_hooks()
        hooked = {name for name in registry._patched if ".quantization." in name}
        assert len(hooked) == 4, hooked
        assert "moe_ops" in module(f"{SRT}.server_args").MOE_RUNNER_BACKEND_CHOICES
        utils, runner = module(f"{SRT}.layers.moe.utils"), module(f"{SRT}.layers.moe.moe_runner.runner")
        backend, none = utils.resolve_moe_runner_backend("moe_ops"), utils.MoeA2ABackend.NONE
        monkeypatch.setattr(runner, "get_moe_a2a_backend", lambda: none)  # what a server's start would say
        monkeypatch.setattr(runner, "get_moe_runner_backend", lambda: backend)
        config = module(f"{SRT}.layers.moe.moe_runner.base").MoeRunnerConfig()
        made = runner.MoeRunner(backend, config)
        standard = module(f"{SRT}.layers.moe.token_dispatcher.standard")
        topk = module(f"{SRT}.layers.moe.topk").StandardTopKOutput(weights, ids, None)
        info = module(f"{SRT}.layers.moe.moe_runner.triton").TritonMoeQuantInfo(tensors[0], tensors[2])
        got = made.run(standard.StandardDispatchOutput(x, None, topk), info)
    assert isinstance(got, standard.StandardCombineInput)
    assert relative_error(got.hidden_states, moe(x, weights, ids, *plain)) < RECIPES["bf16"].max_diff
