"""load_moe_weights: one layer's experts from a checkpoint on disk, one expert at a time."""

import logging
import os

import torch

from moe_ops.checkpoints.family import Experts, find
from moe_ops.checkpoints.files import Files
from moe_ops.checkpoints.layout import Reader
from moe_ops.checkpoints.prepared import MANIFEST, load_prepared
from moe_ops.checkpoints.progress import track
from moe_ops.checkpoints.shard import shard
from moe_ops.prep.builder import PARTS, Builder
from moe_ops.prep.decide import decide
from moe_ops.prep.weights import MoEWeights
from moe_ops.recipes import get_recipe

_OP = "load_moe_weights"
_LOG = logging.getLogger("moe_ops")


def load_moe_weights(
    path: str | os.PathLike,
    *,
    layer: int,
    rank: int = 0,
    world: int = 1,
    parallel: str = "ep",
    recipe: str | None = None,
    scale_format: str | None = None,
    device: torch.device | str = "cpu",
    arch: str | None = None,
    backend: str = "auto",
    on_inexact: str = "raise",
    progress: bool = True,
) -> MoEWeights:
    """Reads, checks and prepares the experts of one layer.

    Names, layout, source format and block size come from config.json. Every header is checked before memory is taken,
    so nothing is half loaded. Host memory: the prepared layer (none of it for a GPU) and the working copies of one
    expert. The summary goes to the log `moe_ops` (INFO) and is the result's `report`.

    Args:
        path: a directory with config.json and safetensors files, one such file, or what `moe-ops convert` wrote.
        layer: its number in the checkpoint.
        rank, world, parallel: ep: this rank's experts, E / world of them, of which the first is rank * E / world (pass
            that as expert_start, and the model's E as num_experts). tp: all experts, a part of I; the ranks' results
            add up to the layer's, and only rank 0 has w2_bias.
        recipe, scale_format: None: what prep.decide names for the source and the device.
        device: where the tensors go. arch, backend: what will run them, if it is another; see prep.decide.
        on_inexact: for MXFP4 as fp8 blocks, raise or warn if a 128 x 128 tile cannot be held exactly.
        progress: show a bar, if stderr is a terminal and rich is installed.

    Raises:
        ValueError, TypeError: a tensor is missing, extra, truncated or of another shape or dtype (the sentence names
            it, its file and what was expected), or the preparation refuses it. FileNotFoundError: no such path.
            ImportError: safetensors is not installed.
    """
    device = torch.device(device)
    with Files(_OP, path) as files:
        if (files.root / MANIFEST).is_file():
            wanted = dict(recipe=recipe, scale_format=scale_format)
            return load_prepared(files, layer, rank=rank, world=world, parallel=parallel, device=device, **wanted)
        experts = find(files, layer)
        choice = decide(
            experts.quant.kind,
            recipe=recipe,
            scale_format=scale_format,
            device=arch or device,
            backend=backend,
            op=_OP,
        )
        weights = _build(files, experts, choice, rank, world, parallel, device, on_inexact, (layer, progress))
    _LOG.info("layer %d: %s", layer, weights.report)
    return weights


def _build(files: Files, experts: Experts, choice, rank, world, parallel, device, on_inexact, shown) -> MoEWeights:
    sizes, layout, quant = experts.sizes, experts.layout, experts.quant
    part_of = shard(_OP, parallel, rank, world, sizes, quant, get_recipe(_OP, choice.recipe))
    first, last = part_of.columns
    builder = Builder(
        _OP,
        choice,
        E=len(part_of.experts),
        I=last - first,
        K=sizes.K,
        padded_I=part_of.padded_I,
        device=device,
        on_inexact=on_inexact,
    )
    reader = Reader(files, experts.experts_prefix)
    layer, progress = shown
    for expert in track(part_of.experts, len(part_of.experts), f"layer {layer}", progress):
        for part in PARTS:
            source = layout.read(reader, expert, part, part_of.columns, sizes, quant)
            builder.put(expert - part_of.experts.start, part, source)
    biases = layout.biases(reader, part_of.experts, part_of.columns, sizes)
    if not part_of.adds_bias:
        biases.pop("w2_bias", None)
    return builder.finish(**biases)
