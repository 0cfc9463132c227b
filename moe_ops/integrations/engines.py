"""What the engines' plug-ins share: imports that fail in words, and arguments that every call of an engine needs."""

import importlib
from importlib import metadata
from typing import Any

import torch
from torch import Tensor

from moe_ops import check
from moe_ops import forward as _ops  # noqa: F401  registers the ops
from moe_ops.prep.source import E4M3


def imported(op: str, wanted: str, module: str, *names: str) -> list[Any]:
    """Names of an engine's module.

    Args:
        op: for the sentence. wanted: the distribution and version that has them, as in "vllm 0.34".

    Raises:
        ImportError: the engine is missing, or this version of it lacks a name.
    """
    try:
        found = importlib.import_module(module)
        return [getattr(found, name) for name in names]
    except (ImportError, AttributeError) as error:
        distribution = wanted.split()[0]
        got = f"{_version(distribution)}: {error}"
        raise ImportError(check.sentence(op, distribution, f"as {wanted} is", got, f"Install {wanted}.")) from error


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "none"


def weights(op: str, w13: Tensor, w13_scale: Tensor | None, w2: Tensor, w2_scale: Tensor | None, block) -> dict:
    """An engine's weights as arguments of fused_deepgemm: bf16, or e4m3 with fp32 scales of 128 x 128 blocks.

    Args:
        w13: (E, 2 I, K), gate rows over up rows; w2: (E, K, I). block: rows and columns of a scale, or None.

    Raises:
        NotImplementedError: weights in another form.
    """
    found = dict(w13=w13, w13_scale=w13_scale, w2=w2, w2_scale=w2_scale)
    if w13.dtype == torch.bfloat16:
        return {**found, "w13_scale": None, "w2_scale": None, "recipe": "bf16"}
    if w13.dtype == E4M3 and block is not None and tuple(block) == (128, 128):
        return {**found, "recipe": "fp8_block"}
    got = f"{str(w13.dtype).removeprefix('torch.')} with blocks {block}"
    fix = "Load a checkpoint of one of these kinds, or use the engine's own experts."
    raise NotImplementedError(check.sentence(op, "the experts", "bf16, or fp8 in 128 x 128 blocks", got, fix))
