"""Prepared layers on disk: safetensors that load with no further work, one file a layer and rank, and a manifest."""

import json
import os
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor

from moe_ops import check
from moe_ops.checkpoints.files import Files
from moe_ops.meta.grouped_gemm import weight_scale_spec
from moe_ops.prep.report import Padding, PrepReport
from moe_ops.prep.weights import MoEWeights
from moe_ops.recipes import FLOATS, get_recipe
from moe_ops.rows import align
from moe_ops.spec import TensorSpec

MANIFEST = "moe_ops.json"
VERSION = 1
_ROUTER = "router."


def layer_file(layer: int, rank: int, world: int) -> str:
    suffix = "" if world == 1 else f"-rank-{rank:03d}-of-{world:03d}"
    return f"layer-{layer:05d}{suffix}.safetensors"


def save_layer(file: Path, weights: MoEWeights, router: dict[str, Tensor]) -> None:
    """Writes one layer. Packed scales go out as the memory they are, (E, words, rows padded to 4), because safetensors
    keeps no strides. The file appears whole or not at all."""
    from safetensors.torch import save_file

    tensors = {name: _stored(tensor) for name, tensor in weights.tensors().items() if tensor is not None}
    tensors |= {_ROUTER + name: tensor.contiguous() for name, tensor in router.items()}
    unfinished = file.with_suffix(".unfinished")
    save_file(tensors, unfinished, metadata={"format": "moe_ops"})
    os.replace(unfinished, file)


def _stored(tensor: Tensor) -> Tensor:
    if tensor.dtype != torch.int32:
        return tensor.contiguous()
    E, N, words = tensor.shape
    column = align(N, 4)
    return tensor.as_strided((E, words, column), (words * column, column, 1))


def describe(weights: MoEWeights) -> dict:
    """A layer's entry in the manifest."""
    return {
        "recipe": weights.recipe,
        "scale_format": weights.scale_format,
        "E": weights.E,
        "K": weights.K,
        "I": weights.I,
        "padding": asdict(weights.padding),
        "report": None if weights.report is None else asdict(weights.report),
    }


def save_manifest(root: Path, *, parallel: str, world: int, layers: dict[int, list[dict]]) -> None:
    """Written last: without it the directory is no prepared checkpoint. `layers` holds an entry per rank."""
    content = {"version": VERSION, "parallel": parallel, "world": world, "layers": layers}
    (root / MANIFEST).write_text(json.dumps(content, indent=1) + "\n")


def _manifest(files: Files, layer: int) -> tuple[str, int, list[dict]]:
    """(parallel, world, entries of the layer, one a rank)."""
    manifest = files.json(MANIFEST)
    version, fix = manifest.get("version"), "Convert the checkpoint again with this version."
    check.value(version == VERSION, files.op, f"version of {MANIFEST}", str(VERSION), version, fix)
    layers = manifest["layers"]
    rule = "one of " + ", ".join(layers)
    check.value(str(layer) in layers, files.op, "layer", rule, layer, "Convert it too, or choose another.")
    return manifest["parallel"], manifest["world"], layers[str(layer)]


def load_prepared(
    files: Files,
    layer: int,
    *,
    rank: int,
    world: int,
    parallel: str,
    device: torch.device,
    recipe: str | None,
    scale_format: str | None,
) -> MoEWeights:
    """A layer that save_layer wrote. On the CPU its tensors are the mapped file itself. A layer that was not sharded
    serves every ep world that divides its experts."""
    op = files.op
    made_parallel, made_world, entries = _manifest(files, layer)
    check.value(0 <= rank < world, op, "rank", f"in [0, {world})", rank, "Ranks count from 0.")
    whole = made_world == 1
    fits = (parallel == "ep" or world == 1) if whole else (parallel, world) == (made_parallel, made_world)
    rule = "parallel='ep' or world=1" if whole else f"parallel={made_parallel!r}, world={made_world}"
    check.value(fits, op, "the shard", rule, f"parallel={parallel!r}, world={world}", "Convert for these ranks.")
    entry = entries[0 if whole else rank]
    for name, wanted in (("recipe", recipe), ("scale_format", scale_format)):
        fix = f"Convert the original checkpoint with {name}={wanted!r}."
        check.value(wanted in (None, entry[name]), op, name, f"{entry[name]!r}, as prepared", repr(wanted), fix)

    E = entry["E"]
    some = slice(0, E)
    if whole:
        check.multiple(op, "E", E, world, "Choose a world that divides the experts.")
        some = slice(rank * E // world, (rank + 1) * E // world)
    file = layer_file(layer, 0 if whole else rank, made_world)
    tensors = {}
    for name, spec in _specs(entry).items():
        packed = spec.dtype == torch.int32
        if name.endswith("_bias") and name not in files.header(file):
            continue
        files.where[name] = file
        shape = (E, spec.shape[2], spec.stride[2]) if packed else spec.shape
        files.expect(name, (shape,), FLOATS if name.endswith("_bias") else (spec.dtype,))
        tensor = files.get(name, some).to(device)
        tensors[name] = tensor.transpose(1, 2)[:, : spec.shape[1]] if packed else tensor
    scales = {name: tensors.pop(name, None) for name in ("w13_scale", "w2_scale")}
    return MoEWeights(
        **tensors,
        **scales,
        recipe=entry["recipe"],
        scale_format=entry["scale_format"],
        padding=Padding(**entry["padding"]),
        report=_report(entry["report"]),
    )


def _specs(entry: dict) -> dict[str, TensorSpec]:
    """The tensors of a layer's file, by name; biases may be absent."""
    row = get_recipe("load_moe_weights", entry["recipe"], entry["scale_format"])
    E, K, I = entry["E"], entry["K"], entry["I"]
    specs = {}
    for name, N, width in (("w13", 2 * I, K), ("w2", K, I)):
        specs[name] = TensorSpec.contiguous(E, N, width // row.w_pack, dtype=row.w_dtype)
        if row.quantised:
            specs[f"{name}_scale"] = weight_scale_spec(E, N, width, row, entry["scale_format"])
        specs[f"{name}_bias"] = TensorSpec.contiguous(E, N, dtype=torch.float32)
    return specs


def _report(entry: dict | None) -> PrepReport | None:
    return None if entry is None else PrepReport(**{**entry, "padding": Padding(**entry["padding"])})


def prepared_router(files: Files, layer: int) -> dict[str, Tensor]:
    """The router's tensors, which convert put beside the experts of rank 0."""
    _, world, _ = _manifest(files, layer)
    file = layer_file(layer, 0, world)
    names = [name for name in files.header(file) if name.startswith(_ROUTER)]
    check.value(bool(names), files.op, file, "a file with a router", "none", "Read it from the original checkpoint.")
    files.where |= dict.fromkeys(names, file)
    return {name.removeprefix(_ROUTER): files.get(name) for name in names}
