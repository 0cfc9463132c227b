"""Every format: checkpoint -> load -> fused_deepgemm equals the judge on the dequantised checkpoint."""

import json
import logging

import pytest
import torch

from moe_ops import MoEWeights, fused_deepgemm, load_moe_weights, load_router
from moe_ops.prep import Padding
from moe_ops.recipes import get_recipe
from moe_ops.reference.moe import moe
from moe_ops.testing import assert_bits_equal, random_routing, relative_error
from moe_ops.testing.checkpoints import FORMATS, Truth, added_error, meaning, write_checkpoint

ROUNDS = {"requantise"}


def run(weights: MoEWeights, x: torch.Tensor, routing, **more) -> torch.Tensor:
    out = fused_deepgemm(weights.pad_hidden(x), *routing, **weights.tensors(), recipe=weights.recipe, **more)
    return weights.cut_hidden(out)


def judge(truth: Truth, x: torch.Tensor, routing, **more) -> torch.Tensor:
    return moe(x, *routing, truth.w13, truth.w2, w13_bias=truth.w13_bias, w2_bias=truth.w2_bias, **more)


def inputs(T: int, E: int, K: int):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(T, K, generator=generator).bfloat16()
    return x, random_routing(T, E, 2, "uniform", generator)


@pytest.mark.parametrize("arch", ["cpu", "sm90", "sm100"])
@pytest.mark.parametrize("name", FORMATS)
def test_load_means_what_the_checkpoint_means(tmp_path, name, arch):
    _, truth = write_checkpoint(tmp_path, name, E=4, K=256, I=192, layers=2)
    weights = load_moe_weights(tmp_path, layer=1, arch=arch)
    report, got = weights.report, meaning(weights)
    assert report is not None and report.source == FORMATS[name].kind
    if report.path in ROUNDS:
        error = added_error(got, truth)
        assert report.relative_error == pytest.approx(error, rel=1e-6) and 0 < error < 0.03
    else:
        assert report.relative_error == 0
        assert_bits_equal(got.w13, truth.w13)
        assert_bits_equal(got.w2, truth.w2)
    for bias in ("w13_bias", "w2_bias"):
        want = getattr(truth, bias)
        assert (getattr(got, bias) is None) == (want is None)
        assert want is None or torch.equal(getattr(got, bias), want)

    x, routing = inputs(64, 4, 256)
    formula = {"gemm1_alpha": 1.702, "gemm1_clamp_limit": 7.0} if "gpt_oss" in name else {}
    out, allowed = run(weights, x, routing, **formula), get_recipe("test", weights.recipe).max_diff
    assert relative_error(out, judge(got, x, routing, **formula)) <= allowed
    # Two matrices in a row, each off by the reported error, on top of what the activations cost.
    allowed = (allowed**2 + 3 * report.relative_error**2) ** 0.5
    assert relative_error(out, judge(truth, x, routing, **formula)) <= allowed


@pytest.mark.parametrize("name", ["deepseek_v3_fp8", "qwen3_fp8"])
def test_load_block_fp8_of_powers_of_two_is_exact_on_blackwell(tmp_path, name):
    (truth,) = write_checkpoint(tmp_path, name, powers_of_two=True)
    weights = load_moe_weights(tmp_path, layer=0, arch="sm100")
    assert weights.scale_format == "ue8m0" and weights.report is not None and weights.report.relative_error == 0
    assert_bits_equal(meaning(weights).w13, truth.w13)


@pytest.mark.parametrize("recipe", ["bf16", "fp8_block", "mxfp8", "mxfp4"])
@pytest.mark.parametrize("name", ["qwen3_bf16", "deepseek_v4_mxfp4", "deepseek_v3_fp8", "gpt_oss_bf16"])
def test_load_any_recipe(tmp_path, name, recipe):
    (truth,) = write_checkpoint(tmp_path, name)
    weights = load_moe_weights(tmp_path, layer=0, recipe=recipe, device="cpu")
    assert weights.recipe == recipe and weights.report is not None
    assert weights.report.relative_error == pytest.approx(added_error(meaning(weights), truth), rel=1e-5, abs=1e-9)


def test_load_one_file_and_no_index(tmp_path):
    write_checkpoint(tmp_path, "qwen3_fp8", files=1)
    (file,) = tmp_path.glob("*.safetensors")
    want = load_moe_weights(tmp_path, layer=0)
    (tmp_path / "model.safetensors.index.json").unlink()
    for path in (tmp_path, file):
        assert_bits_equal(load_moe_weights(path, layer=0).w13, want.w13)


def test_load_a_vision_model_nests_its_language_model(tmp_path):
    from safetensors.torch import load_file, save_file

    (truth,) = write_checkpoint(tmp_path, "qwen3_bf16", files=1)
    (file,) = tmp_path.glob("*.safetensors")
    renamed = {name.replace("model.", "model.language_model.", 1): t for name, t in load_file(file).items()}
    save_file(renamed, file)
    (tmp_path / "model.safetensors.index.json").unlink()
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_vl_moe", "text_config": config}))
    assert_bits_equal(meaning(load_moe_weights(tmp_path, layer=0)).w13, truth.w13)


def test_load_stacked_experts_of_the_hub_library(tmp_path):
    """gate_up_proj (E, 2 I, K) with gate_up_proj_scale_inv, as modules hold them in memory."""
    from safetensors.torch import load_file, save_file

    (truth,) = write_checkpoint(tmp_path, "qwen3_fp8", E=4, K=256, I=128, files=1)
    (file,) = tmp_path.glob("*.safetensors")
    old, prefix = load_file(file), "model.layers.0.mlp."
    new = {f"{prefix}gate.weight": old[f"{prefix}gate.weight"]}
    for suffix, ending in ((".weight", ""), (".weight_scale_inv", "_scale_inv")):
        part = {
            name: torch.stack([old[f"{prefix}experts.{e}.{name}{suffix}"] for e in range(4)])
            for name in ("gate_proj", "up_proj", "down_proj")
        }
        both = [part[name].view(torch.uint8) for name in ("gate_proj", "up_proj")]
        new[f"{prefix}experts.gate_up_proj{ending}"] = torch.cat(both, 1).view(part["gate_proj"].dtype)
        new[f"{prefix}experts.down_proj{ending}"] = part["down_proj"]
    save_file(new, file)
    (tmp_path / "model.safetensors.index.json").unlink()
    weights = load_moe_weights(tmp_path, layer=0)
    assert_bits_equal(meaning(weights).w13, truth.w13)
    assert_bits_equal(meaning(weights).w2, truth.w2)


def test_load_router(tmp_path):
    write_checkpoint(tmp_path / "v3", "deepseek_v3_fp8")
    router = load_router(tmp_path / "v3", layer=0)
    assert router.weight.shape == (4, 256) and router.correction_bias is not None
    assert (router.logit_bias, router.hash_table) == (None, None)
    write_checkpoint(tmp_path / "v4", "deepseek_v4_mxfp4", layers=2)
    hashed, scored = (load_router(tmp_path / "v4", layer=layer) for layer in (0, 1))
    assert hashed.hash_table is not None and hashed.hash_table.shape == (50, 2) and hashed.correction_bias is None
    assert scored.hash_table is None and scored.correction_bias is not None
    write_checkpoint(tmp_path / "oss", "gpt_oss_mxfp4")
    assert load_router(tmp_path / "oss", layer=0).logit_bias is not None


def test_load_says_one_line_a_layer(tmp_path, caplog):
    write_checkpoint(tmp_path, "deepseek_v4_mxfp4", I=192)
    with caplog.at_level(logging.INFO, "moe_ops"):
        weights = load_moe_weights(tmp_path, layer=0, arch="sm90")
    assert weights.padding == Padding(0, 64)
    assert caplog.messages == [
        "layer 0: mxfp4 -> fp8_block fp32, path mxfp4_to_fp8, 306.00 KiB -> 768.19 KiB, error added 0, "
        "inexact tiles 0 of 48, padded K by 0, I by 64"
    ]
