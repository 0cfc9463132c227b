"""A small model of transformers on a CUDA card: captured decoding with a static cache, and fp8."""

import pytest
import torch

pytest.importorskip("transformers", reason="needs transformers (pip install 'fused-moe-ops[hf]')")

from moe_ops.integrations.transformers import prepare, share_workspace  # noqa: E402
from moe_ops.recipes import RECIPES  # noqa: E402
from moe_ops.testing import relative_error  # noqa: E402
from moe_ops.testing.small_models import small_model  # noqa: E402

pytestmark = pytest.mark.gpu("tests/integrations/test_transformers_models.py")


@pytest.mark.unpoisoned(reason="Dynamo would trace the poison")
@pytest.mark.parametrize("recipe", ["bf16", "fp8_block"])
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_transformers_generates_with_a_static_cache(family, recipe):
    """generate() compiles decoding with CUDA graphs here; every replay gives the logits of the uncompiled model.

    In float32: Inductor rounds elsewhere than eager, and in bf16 a route that flips for it is a good part of the
    logits of a model so small.
    """
    model = small_model(family, dtype=torch.float32).cuda()
    prepare(model, recipe, progress=False)
    prompt = torch.randint(2, 64, (2, 9)).cuda()
    ask = dict(max_new_tokens=12, do_sample=False, output_logits=True, return_dict_in_generate=True)
    want = model.generate(prompt, **ask)
    first, again = (model.generate(prompt, cache_implementation="static", **ask) for _ in range(2))
    assert torch.equal(first.sequences, again.sequences)
    for row in range(len(prompt)):
        same = (first.sequences[row] == want.sequences[row])[prompt.shape[1] :].long().cumprod(0).sum()
        steps = min(int(same) + 1, 12)  # where the same tokens came before
        errors = [relative_error(first.logits[step][row], want.logits[step][row]) for step in range(steps)]
        assert max(errors) < 0.05, (row, errors)


@pytest.mark.parametrize("activation", ["silu", "gelu"])
@pytest.mark.parametrize("recipe", ["bf16", "fp8_block"])
def test_transformers_cuda_matches_cpu(recipe, activation):
    """The experts of one layer, through a formula and through the model's own gate."""
    outputs = []
    for device in ("cpu", "cuda"):
        model = small_model("qwen3_moe", dtype=torch.bfloat16, num_hidden_layers=1, hidden_act=activation).to(device)
        prepare(model, recipe, scale_format=None if recipe == "bf16" else "fp32", progress=False)
        experts = model.model.layers[0].mlp.experts
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(33, 128, generator=generator).bfloat16().to(device)
        ids = torch.rand(33, 8, generator=generator).argsort(1)[:, :2].to(device)
        with torch.no_grad():
            outputs.append(experts(x, ids, torch.full((33, 2), 0.5, device=device)).cpu())
    assert relative_error(outputs[1], outputs[0]) < RECIPES[recipe].max_diff


@pytest.mark.parametrize("recipe", ["bf16", "fp8_block", "repacked mxfp4"])
def test_transformers_layers_share_one_workspace(recipe):
    """The logits of layers that allocate, at a length for each way to lay rows out."""
    repack = recipe.startswith("repacked")
    models = [small_model("qwen3_moe", dtype=torch.bfloat16).cuda() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    for model in models:
        prepare(model, None if repack else recipe, repack=repack, progress=False)
    workspace = share_workspace(models[0], max_tokens=1024)
    with torch.no_grad():
        for length in (1, 16, 512):
            ids = torch.randint(2, 64, (2, length)).cuda()
            shared, alone = (model(ids, use_cache=False).logits for model in models)
            assert torch.equal(shared, alone)
    assert workspace.outgrown_bytes == 0
