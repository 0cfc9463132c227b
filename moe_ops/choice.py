"""Which layout a call takes, and which backend its GEMMs: one table from measurements, by mean rows an expert.

`auto` takes the first row of the device's table that holds the call and can run there. The mean is that of even
routing, T * top_k / num_experts: nothing here looks at data.
"""

from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from moe_ops import arch, backends, check, env
from moe_ops.recipes import get_recipe
from moe_ops.rows import BLOCK, FUSED, LAYOUTS, MASKED_ROWS, masked_tokens
from moe_ops.sizes import Layer
from moe_ops.weight_format import FORMATS

ANY = float("inf")


@dataclass(frozen=True)
class Choice:
    """Up to `rows` mean rows an expert and a hidden size of K: this layout, its GEMMs by this backend."""

    rows: float
    layout: str
    backend: str
    K: float = ANY
    fp8: bool = False
    """Computed from the weights as fp8 blocks, which repacked weights may have beside them."""

    def __str__(self) -> str:
        bound = "" if self.rows == ANY else f" up to {self.rows:g} mean rows an expert"
        hidden = "" if self.K == ANY else f" for K up to {self.K:g}"
        return f"{self.layout}{bound}{hidden}, GEMMs by {self.backend}{' from fp8 blocks' * self.fp8}"


_REFERENCE = (Choice(ANY, "contiguous", "reference"),)
_STAGED = (
    Choice(8, "masked", "triton"),
    Choice(ANY, "contiguous", "deep_gemm"),
    Choice(ANY, "contiguous", "triton"),
)
# One H200, torch 2.11, triton 3.6, sgl-deep-gemm 0.1.4, 2026-12-02, fp8 blocks. With 32
# mean rows an expert gathered takes 204 us, contiguous 239 (E=128 K=2048 I=768); with 64, 264 against 259, and 523
# against 446 (E=32 K=7168 I=2048), where masked takes 434 in twice the memory.
_FEW = (Choice(0.25, "direct", "triton"), Choice(32, "gathered", "triton"))
_MANY = (Choice(ANY, "contiguous", "deep_gemm"), Choice(ANY, "gathered", "triton"), *_STAGED)
# Tiles of 128 rows (kernels/pipelined.py), same card: K=2048, 256 and 1024 rows, 536 and 1661 us against 566 and 1744;
# K=7168, 256 and 1024 rows, 1016 and 3088 against 942 and 2965.
_PIPELINED = (Choice(127, "contiguous", "deep_gemm"), Choice(ANY, "gathered", "triton", K=4096))
_HOPPER = {"bf16": _FEW + _MANY, "fp8_block": _FEW + _PIPELINED + _MANY}
# Never run there: the library's own layouts as SGLang uses them, Triton where it is missing.
_BLACKWELL = (
    Choice(192, "masked", "deep_gemm"),
    Choice(ANY, "contiguous", "deep_gemm"),
    Choice(ANY, "gathered", "triton"),
    Choice(8, "masked", "triton"),
    Choice(ANY, "contiguous", "triton"),
)


REPACKED_ROWS = 32
"""Mean rows an expert up to which weights repacked for Hopper are faster than their copy as fp8 blocks."""


def table(architecture: str, recipe: str, repacked: bool = False) -> tuple[Choice, ...]:
    """The rows for a name in arch.ARCHS."""
    if architecture == "cpu":
        return (Choice(ANY, "gathered", "reference"),) if repacked else _REFERENCE
    if repacked:
        return (Choice(ANY, "gathered", "triton"),)
    return _HOPPER.get(recipe, _STAGED) if architecture == "sm90" else _BLACKWELL


def choose(op: str, layer: Layer, backend: str, device: torch.device | str) -> Choice:
    """The layout and the GEMMs' backend of one call. An explicit layout keeps the backend that was asked for.

    device: where the tensors are, or a name in arch.ARCHS, whose deep_gemm is then taken to be installed.
    """
    forced = env.backend() if backend == "auto" else None
    backend = forced or backend
    check.one_of(op, "MOE_OPS_BACKEND" if forced else "backend", backend, backends.BACKENDS)
    if layer.layout != "auto":
        check.one_of(op, "layout", layer.layout, LAYOUTS)
        reason = _why_not_layout(layer.layout, layer)
        names = ", ".join(layouts(layer))
        check.value(
            reason is None, op, "layout", f"auto or one of {names} here", repr(layer.layout), f"{reason} Pass auto."
        )
        return Choice(ANY, layer.layout, backend)
    return _choose(layer, backend, device, backends.has_stand_in())


@lru_cache(maxsize=4096)
def _choose(layer: Layer, backend: str, device: torch.device | str, stand_in: bool) -> Choice:
    mean = layer.whole * layer.top_k / layer.experts
    if layer.has_fp8 and mean > REPACKED_ROWS:
        return replace(_choose(layer.as_fp8(), backend, device, stand_in), fp8=True)
    rows = candidates(layer, backend, device)
    fitting = (choice for choice, reason in rows if reason is None and mean <= choice.rows)
    # Nothing fits: the last row, whose kernels say why they cannot run.
    return next(fitting, rows[-1][0])


def candidates(layer: Layer, backend: str, device: torch.device | str) -> list[tuple[Choice, str | None]]:
    """The device's table for this layer: each row with the reason why it cannot run, or None."""
    repacked = FORMATS[layer.weight_format].repacked
    if backend == "reference":
        return [(row, None) for row in table("cpu", layer.recipe, repacked)]
    rows = table(arch.arch_of("choose", device), layer.recipe, repacked)
    if backend not in ("auto", *(row.backend for row in rows)):
        rows = (
            Choice(ANY, "gathered" if repacked else "contiguous", backend),
        )  # triton in its interpreter, deep_gemm's stand-in
    return [(row, _why_not(row, layer, device)) for row in rows if backend in ("auto", row.backend)]


def token_bounds(
    layer: Layer, backend: str = "auto", device: torch.device | str | None = None
) -> dict[str, tuple[int, float]]:
    """Layout -> (least, most) tokens for which layout="auto" may take it: what a workspace has to hold.

    device: where the calls run; None: anywhere. Whether deep_gemm can run is left open: its rows of the table may be
    taken or passed over. Triton's rows are always taken, so that none behind them with fewer rows an expert is.
    """
    backend = (env.backend() if backend == "auto" else None) or backend
    bounds: dict[str, tuple[int, float]] = {}
    for name in arch.ARCHS if device is None else (arch.arch_of("choose", device),):
        taken = 0  # up to so many tokens by a row that is certain
        for row, _ in candidates(replace(layer, T=0), backend, name):
            most = ANY if row.rows == ANY else int(row.rows * layer.experts) // layer.top_k
            if _why_not_layout(row.layout, layer) is not None or layer.K > row.K or most <= taken:
                continue
            certain = row.backend != "deep_gemm" and row.layout != "masked"
            most = min(most, masked_tokens(layer.E)) if row.layout == "masked" else most
            least, other = bounds.get(row.layout, (taken + 1, 0))
            bounds[row.layout] = (min(least, taken + 1), max(most, other))
            if most == ANY and certain:
                break
            taken = int(most) if certain else taken
    return bounds


def layouts(layer: Layer) -> tuple[str, ...]:
    """The layouts that hold this layer's recipe, weight format and sizes, on any device."""
    return tuple(name for name in LAYOUTS[1:] if _why_not_layout(name, layer) is None)


def _why_not_layout(layout: str, layer: Layer) -> str | None:
    """Why no device has kernels for this layout, or None."""
    if FORMATS[layer.weight_format].repacked and layout != "gathered":
        return f"Weights in the format {layer.weight_format} are read in the gathered layout alone."
    if layout in FUSED:
        if not (get_recipe("choose", layer.recipe).fused or FORMATS[layer.weight_format].repacked):
            return f"The {layout} layout has no kernels for {layer.recipe}."
        if layer.K % BLOCK or layer.I % BLOCK:
            return f"The {layout} layout needs K and I to be multiples of {BLOCK}."
    return None


def _why_not(choice: Choice, layer: Layer, device: torch.device | str) -> str | None:
    reason = _why_not_layout(choice.layout, layer)
    if reason is not None:
        return reason
    if layer.K > choice.K:
        return f"It is the faster one for K up to {choice.K:g}."
    if choice.layout == "masked" and layer.whole > masked_tokens(layer.E):
        return f"The slabs would have more than {MASKED_ROWS} rows."
    if choice.backend == "deep_gemm":
        depths = (layer.K, layer.I)
        return backends.why_not_grouped(device, layer.recipe, layer.scale_format, choice.layout, depths)
    return None
