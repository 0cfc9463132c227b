"""A damaged or foreign checkpoint: the sentence names tensor, file and what was expected; nothing half loads."""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from moe_ops import load_moe_weights, load_router
from moe_ops.prep import builder
from moe_ops.testing.checkpoints import write_checkpoint

FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
GATE = "model.layers.0.mlp.experts.2.gate_proj.weight"
DOWN_SCALE = "model.layers.0.mlp.experts.3.down_proj.weight_scale_inv"
INDEX = "model.safetensors.index.json"


@pytest.fixture
def checkpoint(tmp_path, monkeypatch) -> Path:
    """DeepSeek-V3 fp8, and memory for the layer that nobody may take."""
    write_checkpoint(tmp_path, "deepseek_v3_fp8")

    def refuse(*_, **__):
        raise AssertionError("memory was taken before the checkpoint was checked")

    monkeypatch.setattr(builder.Builder, "_allocate", refuse)
    return tmp_path


def where(root: Path, name: str) -> str:
    return json.loads((root / INDEX).read_text())["weight_map"][name]


def rewrite(root: Path, file: str, change) -> None:
    tensors = load_file(root / file)
    change(tensors)
    save_file(tensors, root / file)


def edit_json(root: Path, name: str, change) -> None:
    content = json.loads((root / name).read_text())
    change(content)
    (root / name).write_text(json.dumps(content))


def fails(root: Path, sentence: str, error=ValueError, load=load_moe_weights, **more) -> None:
    with pytest.raises(error) as caught:
        load(root, layer=0, **more)
    assert str(caught.value) == sentence


def test_missing_tensor(checkpoint):
    edit_json(checkpoint, INDEX, lambda index: index["weight_map"].pop(GATE))
    fails(
        checkpoint,
        f"load_moe_weights: {GATE} must be in the checkpoint, of shape (128, 256); got no such tensor. "
        "The checkpoint is incomplete.",
    )


def test_missing_from_the_file_that_the_index_names(checkpoint):
    file = where(checkpoint, GATE)
    rewrite(checkpoint, file, lambda tensors: tensors.pop(GATE))
    fails(
        checkpoint,
        f"load_moe_weights: {GATE} must be in {file}, as the index says; got no such tensor. Download it again.",
    )


def test_missing_file(checkpoint):
    (checkpoint / SECOND).unlink()
    fails(checkpoint, f"load_moe_weights: {SECOND} must be in {checkpoint}; got no such file. Download it again.")


def test_extra_expert(checkpoint):
    extra = "model.layers.0.mlp.experts.4.gate_proj.weight"
    rewrite(checkpoint, FIRST, lambda tensors: tensors.update({extra: torch.zeros(1)}))
    edit_json(checkpoint, INDEX, lambda index: index["weight_map"].update({extra: FIRST}))
    fails(
        checkpoint,
        f"load_moe_weights: {extra} in {FIRST} must be a tensor that this model has; got an extra one. "
        "config.json says E=4 and fp8_block weights: it is for another checkpoint.",
    )


def test_scale_of_an_unquantised_config_is_extra(checkpoint):
    edit_json(checkpoint, "config.json", lambda config: config.pop("quantization_config"))
    name = "model.layers.0.mlp.experts.0.gate_proj.weight"
    fails(
        checkpoint,
        f"load_moe_weights: {name} in {where(checkpoint, name)} must be F32 or F16 or BF16; got F8_E4M3. "
        "config.json describes another model, or the file is damaged.",
        TypeError,
    )


def test_static_activation_scales_are_no_weights(tmp_path):
    write_checkpoint(tmp_path, "qwen3_fp8_tensor")
    extra = "model.layers.0.mlp.experts.0.gate_proj.input_scale"
    rewrite(tmp_path, FIRST, lambda tensors: tensors.update({extra: torch.ones(1)}))
    edit_json(tmp_path, INDEX, lambda index: index["weight_map"].update({extra: FIRST}))
    assert load_moe_weights(tmp_path, layer=0).E == 4


@pytest.mark.parametrize("keep", [0.5, 0.999])
def test_truncated_file(checkpoint, keep):
    file = checkpoint / FIRST
    content = file.read_bytes()
    file.write_bytes(content[: int(len(content) * keep)])
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    start = 8 + int.from_bytes(content[:8], "little")
    cut = [(e["data_offsets"][1] + start, n, e) for n, e in header.items() if n != "__metadata__"]
    end, name, entry = min(row for row in cut if row[0] > int(len(content) * keep))
    fails(
        checkpoint,
        f"load_moe_weights: {name} must be whole in {FIRST}: {entry['dtype']} {tuple(entry['shape'])}, up to byte "
        f"{end}; got a file of {int(len(content) * keep)} bytes. It is truncated. Download it again.",
    )


def test_truncated_header(checkpoint):
    file = checkpoint / SECOND
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    for size in (4, 100):
        file.write_bytes(content[:size])
        said = length if size > 8 else int.from_bytes(content[:4], "little")
        fails(
            checkpoint,
            f"load_moe_weights: {SECOND} must be a whole safetensors file, its header {said} bytes long; got {size} "
            "bytes. Download it again.",
        )


@pytest.mark.parametrize(
    "header, reason",
    [
        (b"{no json", "JSONDecodeError: Expecting property name enclosed in double quotes: line 1 column 2 (char 1)"),
        (b'{"a": {"dtype": "F32", "shape": [1]}}', "KeyError: 'data_offsets'"),
    ],
    ids=["no json", "no offsets"],
)
def test_damaged_header(checkpoint, header, reason):
    (checkpoint / SECOND).write_bytes(len(header).to_bytes(8, "little") + header + bytes(64))
    fails(
        checkpoint,
        f"load_moe_weights: {SECOND} must be a file with a header; got one that cannot be read ({reason}). "
        "Download it again.",
    )


def test_index_without_a_map(checkpoint):
    edit_json(checkpoint, INDEX, lambda index: index.pop("weight_map"))
    fails(
        checkpoint,
        f"load_moe_weights: {INDEX} must be an object with a weight_map, tensor name to file; got none. "
        "Download it again.",
    )


@pytest.mark.parametrize("name, shape", [(GATE, (128, 128)), (DOWN_SCALE, (2, 2))])
def test_wrong_shape(checkpoint, name, shape):
    file = where(checkpoint, name)
    want = {GATE: (128, 256), DOWN_SCALE: (2, 1)}[name]
    rewrite(checkpoint, file, lambda tensors: tensors.update({name: torch.zeros(shape).to(tensors[name].dtype)}))
    fails(
        checkpoint,
        f"load_moe_weights: {name} in {file} must be of shape {want}; got {shape}. "
        "config.json describes another model, or the file is damaged.",
    )


def test_wrong_dtype(checkpoint):
    file = where(checkpoint, GATE)
    rewrite(checkpoint, file, lambda tensors: tensors.update({GATE: tensors[GATE].bfloat16()}))
    fails(
        checkpoint,
        f"load_moe_weights: {GATE} in {file} must be F8_E4M3; got BF16. "
        "config.json describes another model, or the file is damaged.",
        TypeError,
    )


def test_config_of_another_model(checkpoint):
    known = (
        "deepseek_v2, deepseek_v3, deepseek_v32, kimi_k2, glm4_moe, deepseek_v4, qwen2_moe, qwen3_moe, qwen3_next, "
        "qwen3_moe_text, qwen3_vl_moe_text, mixtral, gpt_oss"
    )
    edit_json(checkpoint, "config.json", lambda config: config.update(model_type="llama"))
    fails(
        checkpoint,
        f"load_moe_weights: model_type of config.json must be one of {known}; got 'llama'. Describe its names in a "
        "file beside moe_ops/checkpoints/qwen3.py, or call prepare_weights yourself.",
    )


def test_config_without_a_size(checkpoint):
    edit_json(checkpoint, "config.json", lambda config: config.pop("n_routed_experts"))
    fails(
        checkpoint,
        "load_moe_weights: n_routed_experts of config.json must be an integer; got None. Copy it from the model.",
    )


def test_config_missing_or_broken(checkpoint):
    (checkpoint / "config.json").write_text("{")
    fails(
        checkpoint,
        "load_moe_weights: config.json must be a JSON object; got Expecting property name enclosed in double quotes: "
        "line 1 column 2 (char 1). Download it again.",
    )
    (checkpoint / "config.json").unlink()
    fails(
        checkpoint,
        f"load_moe_weights: config.json must be in {checkpoint}; got no such file. Copy it from the model.",
    )


@pytest.mark.parametrize(
    "entry, sentence",
    [
        (
            {"quant_method": "awq"},
            "quant_method of config.json must be one of fp8, fbgemm_fp8, mxfp4, mxfp8, modelopt, compressed-tensors; "
            "got 'awq'",
        ),
        (
            {"quant_method": "modelopt", "quant_algo": "NVFP4"},
            "quant_algo of config.json must be one of FP8, MXFP8; got 'NVFP4'",
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"g": {"weights": {"strategy": "group", "num_bits": 4}}},
            },
            "weights of config_groups must be (type, num_bits, group_size) = ('float', 8, 32); got (None, 4, None)",
        ),
    ],
)
def test_quantisation_that_has_no_path(checkpoint, entry, sentence):
    edit_json(checkpoint, "config.json", lambda config: config.update(quantization_config=entry))
    fails(checkpoint, f"load_moe_weights: {sentence}. Dequantise the checkpoint to bf16 first.")


def test_layer_without_experts(checkpoint):
    with pytest.raises(ValueError) as caught:
        load_moe_weights(checkpoint, layer=7)
    assert str(caught.value) == (
        "load_moe_weights: layer must be one with experts, such as "
        "model.layers.7.mlp.experts.0.gate_proj.weight or model.layers.7.mlp.experts.gate_up_proj; got layer=7, MoE "
        "layers 0 to 0. Choose another."
    )


@pytest.mark.parametrize(
    "more, sentence",
    [
        (dict(rank=2, world=2), "rank must be in [0, 2); got 2. Ranks count from 0."),
        (dict(world=0), "world must be at least 1; got 0. It counts the ranks."),
        (
            dict(world=3),
            "E must be a multiple of 3; got 4. Choose a world that divides the experts, or parallel='tp'.",
        ),
        (dict(parallel="pp"), "parallel must be one of ep, tp; got 'pp'. Choose one of them."),
    ],
)
def test_shard_out_of_range(checkpoint, more, sentence):
    fails(checkpoint, f"load_moe_weights: {sentence}", **more)


def test_path_that_is_not_there(tmp_path):
    path = tmp_path / "nowhere"
    fails(
        path,
        f"load_moe_weights: path must be a checkpoint; got {path}, which is not there. Check it.",
        FileNotFoundError,
    )
    path.mkdir()
    fails(
        path,
        f"load_moe_weights: path must be a directory with *.safetensors files; got {path}. "
        "Pass a directory of safetensors files.",
    )


def test_nan_scale(tmp_path):
    write_checkpoint(tmp_path, "deepseek_v4_mxfp4")
    name = "layers.0.ffn.experts.1.w2.scale"

    def spoil(tensors):
        tensors[name].view(torch.uint8)[5, 2] = 255

    rewrite(tmp_path, where(tmp_path, name), spoil)
    fails(
        tmp_path,
        f"load_moe_weights: {name} in {where(tmp_path, name)} must be exponent bytes from 0 to 254; got 255 at (5, 2). "
        "255 is NaN: the file is damaged.",
    )


def test_tiles_that_would_round(tmp_path):
    write_checkpoint(tmp_path, "deepseek_v4_mxfp4", spread=6.0)
    with pytest.raises(ValueError, match=r"tiles that round in gate of expert \d\. Pass on_inexact='warn'"):
        load_moe_weights(tmp_path, layer=0, arch="sm90")
    with pytest.warns(UserWarning, match=re.escape("inexact tiles")):
        weights = load_moe_weights(tmp_path, layer=0, arch="sm90", on_inexact="warn")
    assert weights.report is not None and weights.report.inexact_tiles > 0


def test_router_missing(checkpoint):
    name = "model.layers.0.mlp.gate.weight"
    edit_json(checkpoint, INDEX, lambda index: index["weight_map"].pop(name))
    fails(
        checkpoint,
        f"load_router: {name} must be in the checkpoint, of shape (4, 256); got no such tensor. "
        "The checkpoint is incomplete.",
        load=load_router,
    )


def test_safetensors_not_installed(checkpoint, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "safetensors", None)
    fails(
        checkpoint,
        "load_moe_weights: safetensors is not installed. pip install 'fused-moe-ops[checkpoints]'",
        ImportError,
    )
