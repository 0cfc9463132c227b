"""Single experts modules: every class that transformers has, gates, fp8 and fp4 modules, memory, shards."""

import importlib
import inspect
import re
import weakref
from pathlib import Path

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="needs transformers (pip install 'fused-moe-ops[hf]')")

from transformers.integrations.moe import use_experts_implementation  # noqa: E402
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts  # noqa: E402
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts  # noqa: E402

from moe_ops.integrations import transformers as integration  # noqa: E402
from moe_ops.recipes import RECIPES  # noqa: E402
from moe_ops.reference.moe import moe  # noqa: E402
from moe_ops.testing import random_routing, relative_error  # noqa: E402
from moe_ops.testing.decode import decode_e2m1, decode_e4m3  # noqa: E402
from moe_ops.testing.small_models import ExpertsConfig, filled, fp8_experts, small_model  # noqa: E402

E, T, top_k = 4, 19, 2
K, I = 96, 200  # multiples of no group: everything quantised is padded
ONE_ROUTE = ("ErgoExpertProjections",)  # its model hands it each route as a row of its own, of weight 1


def config(**given):
    return ExpertsConfig(**{**dict(E=E, K=K, I=I), **given})


def routed(dtype=torch.float32, K=K):
    weights, ids = random_routing(T, E, top_k, "uniform", torch.Generator().manual_seed(1))
    return torch.randn(T, K).to(dtype), ids.long(), weights


def run(module, inputs, implementation="moe_ops"):
    module.config._experts_implementation = implementation
    with torch.no_grad():
        return module(*inputs)


def both(module, inputs):
    """(moe_ops, eager) of one module."""
    want = run(module, inputs, "eager")
    return run(module, inputs), want


def bound(recipe, report):
    """On the difference from eager: the recipe's, and the errors of gate, up and down weights, all independent of one
    another. The gate's counts twice: a gate may bend what it reads (relu2 doubles relative errors)."""
    return (RECIPES[recipe].max_diff ** 2 + 4 * report.relative_error**2) ** 0.5


def classes():
    """(module, class) of everything in transformers.models under @use_experts_implementation."""
    made = []
    for path in sorted(Path(transformers.models.__path__[0]).glob("*/modeling_*.py")):
        for found in re.finditer(r"^@use_experts_implementation.*\nclass (\w+)", path.read_text(), re.M):
            where = f"transformers.models.{path.parent.name}.{path.stem}"
            made.append(pytest.param(where, found[1], id=found[1]))
    return made


@pytest.mark.parametrize("recipe", ["bf16", "fp8_block"])
@pytest.mark.parametrize("where, name", classes())
def test_transformers_every_experts_class_matches_eager(where, name, recipe):
    kind = getattr(importlib.import_module(where), name)
    layer = dict(layer_idx=0) if "layer_idx" in inspect.signature(kind.__init__).parameters else {}
    module = filled(kind(config(swiglu_limits=[1.5], limit_after_act=True), **layer))
    if RECIPES[recipe].quantised and not module.has_gate:
        pytest.skip("experts without a gate are not quantised: see the refusals")
    inputs = routed()
    if name in ONE_ROUTE:
        x, ids, weights = inputs
        inputs = x, ids[:, :1], torch.ones_like(weights[:, :1])
    want = run(module, inputs, "eager")
    report = integration.prepare(module, recipe, progress=False)[""]
    got = run(module, inputs)
    assert got.dtype == want.dtype
    assert relative_error(got, want) < bound(recipe, report)


@pytest.mark.parametrize("recipe", ["bf16", "fp8_block", "mxfp8", "mxfp4"])
@pytest.mark.parametrize("activation", ["gelu", "relu2", "quick_gelu", "silu"])
def test_transformers_gates_that_no_formula_is_run_as_the_model_has_them(activation, recipe):
    module = filled(Qwen3MoeExperts(config(hidden_act=activation)))
    inputs = routed()
    want = run(module, inputs, "eager")
    report = integration.prepare(module, recipe, progress=False)[""]
    assert (module.moe_ops.call.formula is not None) == (activation == "silu")
    assert relative_error(run(module, inputs), want) < bound(recipe, report)


def test_transformers_a_gate_of_interleaved_biased_experts_runs_too():
    class Odd(GptOssExperts):
        def _apply_gate(self, gate_up):
            return torch.tanh(gate_up[..., ::2]) * (gate_up[..., 1::2] + 0.5)  # not 0 where the padding is

    module = filled(Odd(config()))
    inputs = routed()
    want = run(module, inputs, "eager")
    report = integration.prepare(module, "fp8_block", progress=False)[""]
    assert module.moe_ops.call.formula is None
    assert relative_error(run(module, inputs), want) < bound("fp8_block", report)


def plain(self, gate, up):
    return self.act_fn(gate) * up


def clamped(self, gate, up):
    return self.act_fn(gate.clamp(max=self.limit)) * up.clamp(-self.limit, self.limit)


def clamped_late(self, gate, up):
    return self.act_fn(gate).clamp(max=self.limit) * up.clamp(-self.limit, self.limit)


@pytest.mark.parametrize("concatenated", [True, False], ids=["halves", "interleaved"])
@pytest.mark.parametrize(
    "gate, limit, formula",
    [
        (plain, 1.5, {"activation": "silu"}),
        (clamped, 1.5, {"activation": "silu", "swiglu_limit": 1.5}),
        (clamped, 40.0, {"activation": "silu", "swiglu_limit": 40.0}),
        (clamped_late, 1.5, {}),
    ],
    ids=["unused-limit", "limit", "high-limit", "late-limit"],
)
def test_transformers_a_gate_is_known_by_what_it_computes(gate, limit, formula, concatenated):
    """Not by its name, nor by its constants: a limit that it does not apply, or elsewhere, is not taken for a clamp."""

    class Experts(torch.nn.Module):
        def __init__(self, given):
            super().__init__()
            self.num_experts, self.act_fn, self.limit = E, torch.nn.SiLU(), given.swiglu_limit
            self.gate_up_proj = torch.nn.Parameter(torch.empty(E, 2 * I, K))
            self.down_proj = torch.nn.Parameter(torch.empty(E, K, I))

        def forward(self, hidden_states, top_k_index, top_k_weights):
            raise NotImplementedError("no eager form")

        def _apply_gate(self, gate_up):
            return gate(self, *(gate_up.chunk(2, -1) if concatenated else (gate_up[..., ::2], gate_up[..., 1::2])))

    module = filled(use_experts_implementation(Experts, is_concatenated=concatenated)(config(swiglu_limit=limit)))
    inputs = routed()
    want = run(module, inputs, "batched_mm")
    got = run(module.bfloat16(), inputs)
    assert module.moe_ops.call.arguments() == formula
    assert bool(module.moe_ops.call.own) == concatenated
    assert relative_error(got, want) < RECIPES["bf16"].max_diff


@pytest.mark.parametrize("activation", ["silu", "gelu"])
def test_transformers_ids_of_other_ranks_contribute_nothing(activation):
    """Under expert parallelism they arrive as num_experts; a token may have no local expert at all."""
    module = filled(GptOssExperts(config()) if activation == "silu" else Qwen3MoeExperts(config(hidden_act="gelu")))
    x, ids, weights = routed()
    foreign = torch.zeros_like(ids, dtype=torch.bool)
    foreign[:5], foreign[5:9, 0] = True, True
    want = run(module, (x, ids, weights.masked_fill(foreign, 0.0)))
    got = run(module, (x, ids.masked_fill(foreign, E), weights))
    assert torch.equal(got, want)
    assert not got[:5].any() and got[5:].any(1).all()


def decoded(module):
    """Fills the module with random codes and scales that make weights of about 1 / sqrt(K): (w13, w2) in float64."""
    made = []
    for name in ("gate_up_proj", "down_proj"):
        w, scale = getattr(module, name), getattr(module, f"{name}_scale_inv")
        if w.dtype == torch.int8:
            w.copy_(torch.randint(-128, 128, w.shape, dtype=torch.int8))
            values = decode_e2m1(w)
        else:
            w.copy_(torch.randn(w.shape).mul(64).to(w.dtype))
            values = decode_e4m3(w)
        if scale.dtype == torch.float8_e8m0fnu:
            low = 120 if w.dtype == torch.int8 else 114
            byte = torch.randint(low, low + 4, scale.shape, dtype=torch.uint8)
            scale.copy_(byte.view(torch.float8_e8m0fnu))
            factor = 2.0 ** (byte.double() - 127)
        else:
            scale.copy_(torch.rand(scale.shape) * 2**-10 + 2**-12)
            factor = scale.double()
        for axis in (1, 2):
            index = torch.arange(values.shape[axis]) * factor.shape[axis] // values.shape[axis]
            factor = factor.index_select(axis, index)
        made.append(values * factor)
    return made


@pytest.mark.parametrize("swiglu_limit", [None, 0.8])
@pytest.mark.parametrize(
    "arguments, recipe, as_it_is",
    [
        (dict(), "fp8_block", True),
        (dict(scale_fmt="ue8m0"), "fp8_block", False),
        (dict(block_size=None), "fp8_block", False),
        (dict(block_size=(1, 32), scale_fmt="ue8m0"), "mxfp8", False),
        (dict(fp4=True, scale_fmt="ue8m0"), "mxfp4", False),
    ],
    ids=["fp8-128x128", "fp8-ue8m0", "fp8-tensor", "fp8-1x32", "fp4"],
)
def test_transformers_quantised_modules_keep_their_values(arguments, recipe, as_it_is, swiglu_limit):
    constants = dict(swiglu_limit=swiglu_limit, swiglu_alpha=None, mlp_gate_softcap=None)
    module = fp8_experts(config(K=128, I=256, **constants), **arguments)
    w13, w2 = decoded(module)
    x, ids, weights = routed(torch.bfloat16, K=128)
    got = run(module, (x, ids, weights))
    assert module.moe_ops.call.recipe == recipe
    assert bool(module.moe_ops.call.own) == as_it_is
    assert as_it_is or module.moe_ops.report.relative_error == 0
    want = moe(x, weights, ids, w13, w2, swiglu_limit=swiglu_limit)
    assert relative_error(got, want) < RECIPES[recipe].max_diff


def test_transformers_prepares_a_layer_at_a_time_and_frees_it():
    model = small_model("gpt_oss", num_hidden_layers=3)
    layers = [layer.mlp.experts for layer in model.model.layers]
    weights = [weakref.ref(module.gate_up_proj) for module in layers]
    alive = []
    original = integration.prepare_experts

    def watched(*args, **kwargs):
        alive.append(sum(ref() is not None for ref in weights))
        return original(*args, **kwargs)

    integration.prepare_experts = watched
    try:
        integration.prepare(model, progress=False)
    finally:
        integration.prepare_experts = original
    assert alive == [3, 2, 1]
    assert not any(ref() is not None for ref in weights)
    assert sum(p.numel() for module in layers for p in module.parameters()) == 0


def test_transformers_prepares_once_and_casting_leaves_codes_alone():
    module = filled(Qwen3MoeExperts(config()))
    inputs = routed(torch.bfloat16)
    (report,) = integration.prepare(module, "fp8_block", progress=False).values()
    module.config._experts_implementation = "moe_ops"
    with torch.inference_mode():
        before = module(*inputs)
    assert integration.prepare(module, progress=False) == {"": report}
    module.half()
    assert module.moe_ops.w13.dtype == torch.float8_e4m3fn and module.moe_ops.w13_scale.dtype == torch.float32
    assert torch.equal(run(module, inputs), before)
    assert "float -> fp8_block fp32" in repr(module)


def test_transformers_weights_used_as_they_are_may_still_be_prepared():
    module = filled(Qwen3MoeExperts(config())).bfloat16()
    inputs = routed(torch.bfloat16)
    want = run(module, inputs)
    assert module.moe_ops.call.own and not module.moe_ops.state_dict()
    (report,) = integration.prepare(module, "fp8_block", progress=False).values()
    assert relative_error(run(module, inputs), want) < bound("fp8_block", report)


@pytest.fixture
def mesh():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield torch.distributed.init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("at", ["prepare", "first forward"])
def test_transformers_sharded_parameters(mesh, at):
    """transformers shards experts as DTensors, and shows the forward their local parts."""
    parallel_utils = pytest.importorskip("transformers.distributed.parallel_utils", reason="came after 5.17")
    module, whole = (filled(Qwen3MoeExperts(config())) for _ in range(2))
    whole.load_state_dict(module.state_dict())
    inputs = routed()
    want = run(whole, inputs)
    for name in ("gate_up_proj", "down_proj"):
        sharded = torch.distributed.tensor.distribute_tensor(getattr(module, name), mesh)
        setattr(module, name, torch.nn.Parameter(sharded, False))
    if at == "prepare":
        integration.prepare(module, progress=False)
    for _ in range(2):
        with parallel_utils._use_local_dtensor_params(module):
            assert torch.equal(run(module, inputs), want)
    assert not list(module.parameters())
