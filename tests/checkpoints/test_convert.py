"""convert: prepared layers on disk load with no further work, the same bits and strides, under a memory bound."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from moe_ops import MoEWeights, fused_deepgemm, load_moe_weights, load_router
from moe_ops.checkpoints import convert
from moe_ops.cli.application import app
from moe_ops.prep import builder
from moe_ops.testing import assert_bits_equal, random_routing
from moe_ops.testing.checkpoints import FORMATS, write_checkpoint


def equal(got: MoEWeights, want: MoEWeights) -> None:
    assert (got.recipe, got.scale_format, got.padding) == (want.recipe, want.scale_format, want.padding)
    for name, tensor in want.tensors().items():
        other = got.tensors()[name]
        assert (other is None) == (tensor is None), name
        if tensor is not None and other is not None:
            assert_bits_equal(other, tensor, name)
            assert tensor.dtype != torch.int32 or other.stride() == tensor.stride()


@pytest.mark.parametrize("arch", ["cpu", "sm90", "sm100"])
@pytest.mark.parametrize("name", FORMATS)
def test_convert_round_trip(tmp_path, monkeypatch, name, arch):
    write_checkpoint(tmp_path / "src", name, K=640, I=192)  # packed words of width 2 and 5
    want = load_moe_weights(tmp_path / "src", layer=0, arch=arch)
    convert(tmp_path / "src", tmp_path / "dst", arch=arch)
    monkeypatch.setattr(builder.Builder, "put", None)  # no work is left to do
    got = load_moe_weights(tmp_path / "dst", layer=0)
    equal(got, want)
    assert got.report == want.report
    routers = load_router(tmp_path / "src", layer=0), load_router(tmp_path / "dst", layer=0)
    for field in ("weight", "logit_bias", "correction_bias", "hash_table"):
        before, after = (getattr(router, field) for router in routers)
        assert before is after is None or torch.equal(before, after)
    x, routing = torch.randn(5, 640).bfloat16(), random_routing(5, 4, 2, "uniform", torch.Generator())
    outs = [fused_deepgemm(w.pad_hidden(x), *routing, **w.tensors(), recipe=w.recipe) for w in (got, want)]
    assert_bits_equal(*outs)


def test_convert_serves_every_ep_world(tmp_path):
    write_checkpoint(tmp_path / "src", "deepseek_v3_fp8")
    convert(tmp_path / "src", tmp_path / "dst", arch="sm100")
    for world in (1, 2, 4):
        for rank in range(world):
            ranks = dict(layer=0, rank=rank, world=world)
            equal(
                load_moe_weights(tmp_path / "dst", **ranks), load_moe_weights(tmp_path / "src", **ranks, arch="sm100")
            )


@pytest.mark.parametrize("parallel", ["ep", "tp"])
def test_convert_for_ranks(tmp_path, parallel):
    write_checkpoint(tmp_path / "src", "gpt_oss_mxfp4", I=192, layers=2)
    convert(tmp_path / "src", tmp_path / "dst", parallel=parallel, world=2, layers=[1])
    assert sorted(file.name for file in (tmp_path / "dst").iterdir()) == [
        "layer-00001-rank-000-of-002.safetensors",
        "layer-00001-rank-001-of-002.safetensors",
        "moe_ops.json",
    ]
    for rank in range(2):
        ranks = dict(layer=1, rank=rank, world=2, parallel=parallel)
        equal(load_moe_weights(tmp_path / "dst", **ranks), load_moe_weights(tmp_path / "src", **ranks))
    assert load_router(tmp_path / "dst", layer=1).logit_bias is not None


def test_convert_on_the_cpu_maps_the_file(tmp_path):
    """Nothing is copied: the tensors of a layer lie on the mapped file, the packed scales' strides restored on it."""
    write_checkpoint(tmp_path / "src", "deepseek_v4_mxfp4", K=512)
    convert(tmp_path / "src", tmp_path / "dst")
    weights = load_moe_weights(tmp_path / "dst", layer=0)
    maps = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    ours = [line[0].split("-") for line in maps if line[-1].endswith("dst/layer-00000.safetensors")]
    spans = [(int(first, 16), int(last, 16)) for first, last in ours]
    for tensor in weights.tensors().values():
        assert tensor is None or any(first <= tensor.data_ptr() < last for first, last in spans)


@pytest.mark.parametrize(
    "more, sentence",
    [
        (dict(layer=9), "layer must be one of 0; got 9. Convert it too, or choose another."),
        (
            dict(layer=0, recipe="mxfp8"),
            "recipe must be 'mxfp4', as prepared; got 'mxfp8'. Convert the original checkpoint with recipe='mxfp8'.",
        ),
        (
            dict(layer=0, parallel="tp", world=2),
            "the shard must be parallel='ep' or world=1; got parallel='tp', world=2. Convert for these ranks.",
        ),
        (dict(layer=0, world=3), "E must be a multiple of 3; got 4. Choose a world that divides the experts."),
        (dict(layer=0, rank=1), "rank must be in [0, 1); got 1. Ranks count from 0."),
    ],
)
def test_prepared_layer_explains_itself(tmp_path, more, sentence):
    write_checkpoint(tmp_path / "src", "deepseek_v4_mxfp4")
    convert(tmp_path / "src", tmp_path / "dst")
    with pytest.raises(ValueError) as caught:
        load_moe_weights(tmp_path / "dst", **more)
    assert str(caught.value) == f"load_moe_weights: {sentence}"


def test_convert_that_fails_leaves_no_prepared_checkpoint(tmp_path):
    write_checkpoint(tmp_path / "src", "deepseek_v4_mxfp4", spread=6.0)
    with pytest.raises(ValueError, match="tiles that round"):
        convert(tmp_path / "src", tmp_path / "dst", arch="sm90")
    assert list((tmp_path / "dst").iterdir()) == []
    write_checkpoint(tmp_path / "good", "qwen3_fp8")
    convert(tmp_path / "good", tmp_path / "dst")
    with pytest.raises(ValueError) as caught:
        convert(tmp_path / "good", tmp_path / "dst")
    assert str(caught.value) == (
        f"convert: target must be a directory without moe_ops.json; got {tmp_path / 'dst'}. "
        "Choose another, or empty it."
    )


@pytest.mark.parametrize(
    "more, sentence",
    [
        (dict(layers=[]), "convert: layers must be some of [0], or None for all; got []. Choose from them."),
        (dict(layers=[1]), "convert: layers must be among [0]; got 1. Choose from them."),
        (dict(world=0), "convert: world must be at least 1; got 0. It counts the ranks."),
    ],
    ids=str,
)
def test_convert_of_nothing_is_refused_before_anything_is_written(tmp_path, more, sentence):
    write_checkpoint(tmp_path / "src", "qwen3_bf16", E=2, K=128, I=128)
    with pytest.raises(ValueError) as caught:
        convert(tmp_path / "src", tmp_path / "dst", **more)
    assert str(caught.value) == sentence and not (tmp_path / "dst").exists()


def test_command_line(tmp_path):
    write_checkpoint(tmp_path / "src", "deepseek_v4_mxfp4", layers=3)
    arguments = ["convert", str(tmp_path / "src"), str(tmp_path / "dst"), "--arch", "sm90", "--layers", "0,2-2"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    line = "mxfp4 -> fp8_block fp32, path mxfp4_to_fp8, 204.00 KiB -> 384.09 KiB, error added 0, inexact tiles 0 of 24"
    assert result.stdout.splitlines() == [f"layer {layer}: {line}" for layer in (0, 2)]
    assert json.loads((tmp_path / "dst" / "moe_ops.json").read_text())["layers"].keys() == {"0", "2"}
    again = CliRunner().invoke(app, arguments)
    assert again.exit_code == 2 and "target must be a directory without moe_ops.json" in again.stderr
    assert "Traceback" not in again.stderr


@pytest.mark.parametrize("arch", ["cpu", "sm90"])
def test_convert_stays_under_its_memory_bound(tmp_path, arch):
    """A small twin of the run over more than a gigabyte: see convert_memory.py."""
    script = Path(__file__).with_name("convert_memory.py")
    sizes = ["--experts", "24", "--hidden", "2048", "--intermediate", "1024", "--arch", arch]
    command = [sys.executable, str(script), "--work", str(tmp_path / "work"), *sizes]
    result = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert 0 < result["peak_bytes"] <= result["bound_bytes"]
