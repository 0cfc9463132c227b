"""One layer and its routed tokens, for the tests of every engine's plug-in."""

import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec
from types import ModuleType

import pytest
import torch
from torch import Tensor

from moe_ops.csrc_stubs.engines import standing_in
from moe_ops.prep import prepare_weights
from moe_ops.recipes import RECIPES
from moe_ops.testing.cases import random_routing
from moe_ops.testing.decode import decode_weight

E, T, K, I, TOP_K = 8, 23, 256, 128, 2


def module(path: str) -> ModuleType:
    return importlib.import_module(path)


def installed(name: str):
    """Skips where the engine itself is not installed."""
    return pytest.mark.skipif(find_spec(name) is None, reason=f"needs {name} installed")


def kinds(name: str):
    """A test against the stand-in, and against the installed engine."""
    return pytest.mark.parametrize("kind", ["stand-in", pytest.param("installed", marks=installed(name))])


def engine(stub: ModuleType, kind: str, *cached: Callable) -> AbstractContextManager:
    """While it lasts, the engine's modules are of this kind. `cached` are functions that keep classes of another."""
    for function in cached:
        function.cache_clear()  # type: ignore[attr-defined]
    return standing_in(stub) if kind == "stand-in" else nullcontext()


def layer(recipe: str) -> tuple[tuple[Tensor | None, ...], tuple[Tensor, ...]]:
    """(w13, w13_scale, w2, w2_scale) as checkpoints have them, and (w13, w2) in float64."""
    w13, w2 = torch.randn(E, 2 * I, K) / K**0.5, torch.randn(E, K, I) / I**0.5
    row = RECIPES[recipe]
    if not row.quantised:
        w13, w2 = w13.bfloat16(), w2.bfloat16()
        return (w13, None, w2, None), (w13.double(), w2.double())
    made = prepare_weights(w13, w2, recipe=recipe, scale_format="fp32")
    plain = tuple(decode_weight(w, s, row) for w, s in ((made.w13, made.w13_scale), (made.w2, made.w2_scale)))
    return (made.w13, made.w13_scale, made.w2, made.w2_scale), plain


def routed() -> tuple[Tensor, Tensor, Tensor]:
    """(T, K) bf16, topk_weights and topk_ids (T, TOP_K)."""
    weights, ids = random_routing(T, E, TOP_K, "uniform", torch.Generator().manual_seed(1))
    return torch.randn(T, K).bfloat16(), weights, ids.int()
