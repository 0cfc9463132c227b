"""A small model of transformers on a CUDA card: captured decoding with a static cache, and fp8."""

import pytest
import torch

pytest.importorskip("transformers", reason="needs transformers (pip install 'fused-moe-ops[hf]')")

from moe_ops.integrations.transformers import prepare  # noqa: E402
from moe_ops.recipes import RECIPES  # noqa: E402
from moe_ops.testing import relative_error  # noqa: E402
from moe_ops.testing.small_models import small_model  # noqa: E402

pytestmark = pytest.mark.gpu


@pytest.mark.unpoisoned(reason="Dynamo would trace the poison")
@pytest.mark.parametrize("recipe", [None, "fp8_block"])
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_transformers_generates_with_a_static_cache(family, recipe):
    """generate() compiles decoding with CUDA graphs here; every replay gives the tokens of the uncompiled model."""
    model = small_model(family, dtype=torch.bfloat16).cuda()
    prepare(model, recipe, progress=False)
    prompt = torch.randint(2, 64, (2, 9)).cuda()
    want = model.generate(prompt, max_new_tokens=12, do_sample=False, output_logits=True, return_dict_in_generate=True)
    best, second = torch.stack(want.logits, 1).float().topk(2).values.unbind(-1)
    clear = (best - second > 0.3).long().cumprod(1).sum(1).tolist()  # logits; Inductor rounds elsewhere than eager
    for _ in range(2):
        got = model.generate(prompt, max_new_tokens=12, do_sample=False, cache_implementation="static")
        for row, new in enumerate(clear):
            assert got[row, : 9 + new].tolist() == want.sequences[row, : 9 + new].tolist()


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
