"""verify: every recipe, layout and backend that runs here, against a float64 loop that shares no code with them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_ops import arch, backends
from moe_ops.choice import layouts
from moe_ops.recipes import RECIPES
from moe_ops.rows import FUSED
from moe_ops.sizes import Layer
from moe_ops.testing.cases import DISTRIBUTIONS, LayerCase
from moe_ops.testing.compare import relative_error

_WIDE: dict[str, Any] = dict(T=11, E=3, K=1024, I=640, top_k=2)
"""Packed scale words of width 2, and of width 2 with missing bytes."""

_CASES: dict[str, dict] = {
    "silu": {},
    "biases": dict(bias=True),
    "swiglu_limit": dict(attributes={"swiglu_limit": 2.0}),
    "gpt-oss": dict(bias=True, attributes={"gemm1_alpha": 1.702, "gemm1_clamp_limit": 7.0}),
    "situ": dict(attributes={"activation": "situ", "gemm1_alpha": 3.0, "gemm1_clamp_limit": 4.0}),
    "fp16 tokens": dict(dtype=torch.float16),
    "fp32 tokens": dict(dtype=torch.float32),
    "rank 1 of 2": dict(distribution="foreign", attributes={"expert_start": 2, "routed_scaling_factor": 2.5}),
    "many tokens": dict(T=140, E=2, K=128),
    **{f"routing {name}": dict(distribution=name, **_WIDE) for name in DISTRIBUTIONS},
}
# Clamps that most values meet leave out the large values and keep the rounding of the small ones: with swiglu_limit=0.5
# rounding hidden_states to fp8 alone costs 0.052, above the recipe's bound.
QUICK = ("silu", "gpt-oss", "routing foreign")


@dataclass(frozen=True)
class Outcome:
    """Some cases of one recipe in one layout by one backend."""

    recipe: str
    scale_format: str
    layout: str
    backend: str
    cases: int
    error: float
    """The largest: Frobenius norm of the difference over that of the judge's result."""
    worst: str
    """The case that has it."""
    bound: float
    failures: tuple[str, ...]
    """A sentence each: above the bound, not finite, or the call that raised."""

    @property
    def holds(self) -> bool:
        return not self.failures


def verify(quick: bool = False, recipes: tuple[str, ...] = tuple(RECIPES)) -> Iterator[Outcome]:
    """Runs the matrix on the card if there is one, else on the CPU. One outcome a recipe, layout and backend.

    Args:
        quick: three cases of fourteen.
    """
    device = arch.here()
    names = QUICK if quick else tuple(_CASES)
    for recipe in recipes:
        for scale_format in RECIPES[recipe].scale_formats:
            pairs = list(_pairs(recipe, scale_format, device))
            results: dict[tuple[str, str], list[tuple[str, float, str | None]]] = {pair: [] for pair in pairs}
            for name in names:
                case = LayerCase(recipe, scale_format, **_CASES[name])
                inputs, weights = case.build()
                want = case.judge(inputs, weights)
                there = [tensor.to(device) for tensor in inputs]
                tensors = {key: None if t is None else t.to(device) for key, t in weights.tensors().items()}
                for pair in pairs:
                    results[pair].append((name, *_compare(case, there, tensors, pair, want)))
            for (layout, backend), rows in results.items():
                yield _outcome(recipe, scale_format, layout, backend, rows)


def _pairs(recipe: str, scale_format: str, device: torch.device) -> Iterator[tuple[str, str]]:
    """(layout, backend) that can run here; auto and the reference are always among them."""
    layer = Layer(**_WIDE, recipe=recipe, scale_format=scale_format)
    for layout in ("auto", *layouts(layer)):
        if device.type == "cpu":
            yield layout, "reference"
            continue
        for backend in backends.BACKENDS:
            if backend == "deep_gemm":
                depths = (layer.K, layer.I)
                if layout in ("auto", *FUSED):
                    continue
                if backends.why_not_grouped(device, recipe, scale_format, layout, depths) is not None:
                    continue
            elif not arch.runs(recipe, scale_format, device, backend):
                continue
            yield layout, backend


def _compare(
    case: LayerCase,
    inputs: Sequence[Tensor],
    weights: Mapping[str, Tensor | None],
    pair: tuple[str, str],
    want: Tensor,
) -> tuple[float, str | None]:
    """(error, what is wrong or None) of one call."""
    layout, backend = pair
    form = dict(recipe=case.recipe, layout=layout, backend=backend)
    try:
        out = torch.ops.moe.fused_deepgemm(*inputs, **weights, **form, **case.attributes).cpu()
    except Exception as error:  # a compiler, a library or the driver may raise anything
        return float("nan"), f"{type(error).__name__}: {error}"
    error = relative_error(out, want)
    if not error <= case.max_diff:
        return error, f"error {error:.4f} above {case.max_diff}"
    return error, None


def _outcome(recipe: str, scale_format: str, layout: str, backend: str, rows: list) -> Outcome:
    name, error, _ = max(rows, key=lambda row: float("inf") if row[1] != row[1] else row[1])
    failures = tuple(f"{case}: {what}" for case, _, what in rows if what is not None)
    bound = RECIPES[recipe].max_diff
    return Outcome(recipe, scale_format, layout, backend, len(rows), error, name, bound, failures)
