"""convert: a checkpoint's experts, prepared once and written to disk."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from moe_ops import check
from moe_ops.checkpoints.family import choose, moe_layers, text_config
from moe_ops.checkpoints.files import Files
from moe_ops.checkpoints.load import load_moe_weights
from moe_ops.checkpoints.prepared import MANIFEST, describe, layer_file, save_layer, save_manifest
from moe_ops.checkpoints.router import router_tensors

_OP = "convert"


def convert(
    source: str | os.PathLike,
    target: str | os.PathLike,
    *,
    layers: Sequence[int] | None = None,
    parallel: str = "ep",
    world: int = 1,
    say: Callable[[str], None] = lambda line: None,
    **options,
) -> None:
    """Writes prepared layers to a directory that load_moe_weights and load_router read with no further work.

    One safetensors file a layer (and rank, for world > 1), the router in the first, and moe_ops.json, which is written
    last. Memory as in load_moe_weights.

    Args:
        source: a checkpoint. target: a directory, made if it is not there; it must hold no prepared layers yet.
        layers: their numbers. None: all that have experts.
        parallel, world: shard for these ranks. World 1 also serves every ep world that divides the experts; tp has to
            be sharded here.
        say: called with one line a layer and rank.
        options: recipe, scale_format, device, arch, backend, on_inexact, progress of load_moe_weights.

    Raises:
        ValueError: the target holds prepared layers, or the source no experts; no layers, or one that is not there; a
            world below 1. What load_moe_weights raises.
    """
    root = Path(target)
    there = (root / MANIFEST).exists()
    check.value(not there, _OP, "target", f"a directory without {MANIFEST}", root, "Choose another, or empty it.")
    with Files(_OP, source) as files:
        have = moe_layers(files, choose(_OP, text_config(files.json("config.json"))))
        check.value(bool(have), _OP, "source", "a checkpoint with experts", files.root, "Check its config.json.")
        chosen = have if layers is None else list(layers)
        check.value(bool(chosen), _OP, "layers", f"some of {have}, or None for all", chosen, "Choose from them.")
        for layer in chosen:
            check.value(layer in have, _OP, "layers", f"among {have}", layer, "Choose from them.")
        check.value(world >= 1, _OP, "world", "at least 1", world, "It counts the ranks.")
        root.mkdir(parents=True, exist_ok=True)
        entries: dict[int, list[dict]] = {}
        for layer in chosen:
            router = router_tensors(files, layer)
            entries[layer] = []
            for rank in range(world):
                weights = load_moe_weights(source, layer=layer, rank=rank, world=world, parallel=parallel, **options)
                save_layer(root / layer_file(layer, rank, world), weights, router if rank == 0 else {})
                entries[layer].append(describe(weights))
                of_rank = "" if world == 1 else f" rank {rank}"
                say(f"layer {layer}{of_rank}: {weights.report}")
                del weights  # before the next one takes its place
    save_manifest(root, parallel=parallel, world=world, layers=entries)
