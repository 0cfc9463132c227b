"""load_router: what a MoE layer needs beside its experts."""

import os
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_ops.checkpoints.family import find
from moe_ops.checkpoints.files import Files
from moe_ops.checkpoints.prepared import MANIFEST, prepared_router
from moe_ops.recipes import FLOATS

_OP = "load_router"


@dataclass(frozen=True, eq=False)
class Router:
    """The router of one layer, in the checkpoint's dtypes."""

    weight: Tensor
    """(E, K)."""
    logit_bias: Tensor | None = None
    """(E,), added to the logits (gpt-oss)."""
    correction_bias: Tensor | None = None
    """(E,), added to the scores for the choice only: `bias` of moe_ops.topk."""
    hash_table: Tensor | None = None
    """(vocabulary, top_k) expert ids of a layer that routes by token id."""


def load_router(path: str | os.PathLike, *, layer: int, device: torch.device | str = "cpu") -> Router:
    """The router of a layer of a checkpoint, or of what `moe-ops convert` wrote. What the layer lacks is None.

    Raises:
        ValueError, TypeError: the router's weight is missing, or a tensor has another shape or dtype than config.json
            says.
    """
    with Files(_OP, path) as files:
        tensors = prepared_router(files, layer) if (files.root / MANIFEST).is_file() else router_tensors(files, layer)
        return Router(**{name: tensor.to(device, copy=True) for name, tensor in tensors.items()})


def router_tensors(files: Files, layer: int) -> dict[str, Tensor]:
    """The fields of Router that the layer has."""
    experts = find(files, layer)
    family, E, K = experts.family, experts.sizes.E, experts.sizes.K
    name = experts.prefix + family.router
    files.expect(name, ((E, K),), FLOATS)
    found = {"weight": files.get(name)}
    for field in ("logit_bias", "correction_bias", "hash_table"):
        suffix = getattr(family, field)
        if suffix is None or experts.prefix + suffix not in files.where:
            continue
        name = experts.prefix + suffix
        if field != "hash_table":
            files.expect(name, ((E,),), FLOATS)
        found[field] = files.get(name)
    return found
