"""report(): which layout and backend each shape of call took in this process, and why."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from moe_ops.backends import of_layer
from moe_ops.choice import ANY, candidates, choose
from moe_ops.sizes import Layer

Listener = Callable[[Layer, str, torch.device], None]

_seen: dict[tuple[Layer, str, torch.device], None] = {}
LISTENERS: list[Listener] = []
"""Called with (sizes, backend asked for, device) when a shape is seen for the first time."""


def note(layer: Layer, backend: str, device: torch.device) -> None:
    """A forward of this shape begins. Where it is replayed from a CUDA graph, its capture was the one that is noted."""
    key = (layer, backend, device)
    if key in _seen:
        return
    _seen[key] = None
    for listener in LISTENERS:
        listener(layer, backend, device)


def forget() -> None:
    """The next report starts empty."""
    _seen.clear()


@dataclass(frozen=True)
class Taken:
    """Calls that differ in their token counts alone, and went the same way."""

    layer: Layer
    """Its T is the largest one."""
    tokens: tuple[int, ...]
    """Token counts, rising."""
    device: str
    asked: str
    """The backend that the caller named."""
    layout: str
    backend: str
    why: str

    def __str__(self) -> str:
        layer, counts = self.layer, self.tokens
        span = str(counts[0]) if len(counts) == 1 else f"{counts[0]}..{counts[-1]} ({len(counts)} counts)"
        sizes = f"E={layer.E} K={layer.K} I={layer.I} top_k={layer.top_k} {layer.recipe} {layer.scale_format}"
        return f"{self.device} {sizes} T={span}: {self.layout}, GEMMs by {self.backend}. {self.why}"


class Report(tuple[Taken, ...]):
    """One entry per shape and way; printed, one line each."""

    def __str__(self) -> str:
        return "\n".join(map(str, self)) or "No call of fused_deepgemm so far."

    __repr__ = __str__


def report(*, show: bool = True) -> Report:
    """Prints (show=True) and returns which layout and backend every call shape of this process took, and why.

    Replays of a CUDA graph run no Python; they are counted by their capture.
    """
    groups: dict[tuple, list[int]] = {}
    for layer, backend, device in _seen:
        choice = choose("report", layer, backend, device)
        why = "As asked." if layer.layout != "auto" else _why(layer, choice, backend, device)
        form = "fp8 blocks by " if choice.fp8 else ""
        taken = of_layer(layer, device) if choice.backend == "auto" else choice.backend
        way = (replace(layer, T=0, of=-1), str(device), backend, choice.layout, form + taken, why)
        groups.setdefault(way, []).append(layer.whole)
    made = Report(
        Taken(replace(layer, T=max(counts)), tuple(sorted(set(counts))), *rest)
        for (layer, *rest), counts in groups.items()
    )
    if show:
        print(made)
    return made


def _why(layer: Layer, choice, backend: str, device: torch.device) -> str:
    """The rows of the table that come before the one that was taken, each with the reason why it was not."""
    layer = layer.as_fp8() if choice.fp8 else layer
    passed = []
    for row, reason in candidates(layer, backend, device):
        if (row.layout, row.backend, row.rows) == (choice.layout, choice.backend, choice.rows):
            break
        passed.append(f"not {row.layout} by {row.backend}: {reason or f'more than {row.rows:g} mean rows an expert.'}")
    bound = "" if choice.rows == ANY else f", up to {choice.rows:g} mean rows an expert"
    return " ".join([f"First row of the table that holds it{bound}.", *passed])
