"""What the integration does with memory: repacked weights, and one workspace for all layers."""

import copy
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("transformers", reason="needs transformers (pip install 'fused-moe-ops[hf]')")

from torch._dynamo.testing import CompileCounter  # noqa: E402

from moe_ops.integrations.modules import is_experts  # noqa: E402
from moe_ops.integrations.transformers import prepare, share_workspace  # noqa: E402
from moe_ops.planner import plan  # noqa: E402
from moe_ops.recipes import RECIPES  # noqa: E402
from moe_ops.testing import relative_error  # noqa: E402
from moe_ops.testing.small_models import small_model  # noqa: E402


def tokens(batch: int, length: int) -> torch.Tensor:
    return torch.randint(2, 64, (batch, length))


def children(model) -> list:
    return [module.moe_ops for module in model.modules() if is_experts(module)]


def logits(model, ids):
    with torch.no_grad():
        return model(ids, use_cache=False).logits


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize("fp8_copy", [True, False])
def test_transformers_repacked_weights_give_the_same_values(family, fp8_copy):
    """Few rows an expert from the repacked codes, many from the fp8 copy: the values of mxfp4 either way."""
    natural = small_model(family, dtype=torch.bfloat16, num_hidden_layers=1)
    repacked = copy.deepcopy(natural)
    prepare(natural, "mxfp4", progress=False)
    (report,) = prepare(repacked, repack=True, fp8_copy=fp8_copy, progress=False).values()
    assert report.recipe == "mxfp4"
    (child,) = children(repacked)
    assert child.call.weight_format.startswith("sm90_")
    assert (child.w13.dim(), hasattr(child, "w13_fp8")) == (4, fp8_copy)
    experts = [next(m for m in model.modules() if is_experts(m)) for model in (repacked, natural)]
    for T in (5, 200):
        x, weights = torch.randn(T, 128).bfloat16(), torch.rand(T, 2)
        ids = torch.rand(T, 4).argsort(1)[:, :2]
        with torch.no_grad():
            got, want = (module(x, ids, weights) for module in experts)
        bound = RECIPES["mxfp4"].max_diff * 2**0.5  # the same weights; each rounds activations in its own way
        assert relative_error(got, want) < bound


def test_transformers_repacking_is_refused_in_words():
    model = small_model("qwen3_moe", num_hidden_layers=1, hidden_act="gelu")
    with pytest.raises(ValueError, match="must be one with a formula, for repack; got another"):
        prepare(model, repack=True, progress=False)
    model = small_model("qwen3_moe", num_hidden_layers=1)
    with pytest.raises(ValueError, match="weights must be of recipe mxfp4; got fp8_block"):
        prepare(model, "fp8_block", repack=True, progress=False)
    prepare(model, "mxfp4", progress=False)
    with pytest.raises(ValueError, match="must be repacked; got natural. It is prepared already"):
        prepare(model, repack=True, progress=False)


@pytest.mark.unpoisoned(reason="Dynamo would trace the poison")
@pytest.mark.parametrize("family, recipe", [("qwen3_moe", None), ("gpt_oss", "fp8_block"), ("qwen3_moe", "repack")])
def test_transformers_layers_share_one_workspace(family, recipe):
    """Eager, and compiled to one graph for three lengths: the values of layers that allocate."""
    model = small_model(family, dtype=torch.bfloat16, num_hidden_layers=2)
    recipe = dict(repack=True) if recipe == "repack" else dict(recipe=recipe)
    prepare(model, **recipe, progress=False)
    alone = copy.deepcopy(model)
    workspace = share_workspace(model, max_tokens=64)
    first, second = children(model)
    assert first.workspace is second.workspace is workspace
    call = first.call
    if call.weight_format == "natural":
        E, K, I = first.tensors(model.model.layers[0].mlp.experts)["w2"].shape
        asked = plan(T=64, E=E, K=K, I=I, top_k=2, recipe=call.recipe, scale_format=call.scale_format)
        assert workspace.nbytes == asked.workspace_bytes
    counter = CompileCounter()
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=counter, fullgraph=True, dynamic=True)
    for length in (5, 9, 17):
        ids = tokens(2, length)
        want = logits(alone, ids)
        assert torch.equal(logits(model, ids), want) and torch.equal(logits(compiled, ids), want)
    assert counter.frame_count == 1
    with pytest.raises(ValueError, match=r"workspace must be at least \d+ bytes"):
        logits(model, tokens(2, 400))
    workspace.grow(800)
    ids = tokens(2, 400)
    assert torch.equal(logits(model, ids), logits(alone, ids))


def test_transformers_sharing_leaves_models_savable(tmp_path):
    model = small_model("qwen3_moe", dtype=torch.bfloat16, num_hidden_layers=1)
    with pytest.raises(ValueError, match=r"must be prepared; got experts that are not. Call prepare\(model\) first."):
        share_workspace(model, max_tokens=8)
    prepare(model, progress=False)
    share_workspace(model, max_tokens=8)
    assert not any("moe_ops" in name for name in model.state_dict())
    model.save_pretrained(tmp_path)
    for module in filter(is_experts, model.modules()):
        module.config = SimpleNamespace(_experts_implementation="moe_ops")
    with pytest.raises(ValueError, match="top_k of .* must be in its configuration; .* Pass top_k"):
        share_workspace(model, max_tokens=8)
    assert share_workspace(model, max_tokens=8, top_k=2).max_tokens == 8
