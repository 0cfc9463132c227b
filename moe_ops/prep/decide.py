"""The one decision of weight preparation: from what, to what, by which path.

What a backend reads on which device is arch.READS, for load time here and for run time alike.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from moe_ops import check
from moe_ops.arch import READS, arch_of, default_scale_format, runs
from moe_ops.prep import mxfp4, mxfp4_to_fp8, mxfp8
from moe_ops.prep.converted import Converted
from moe_ops.prep.expand import expand
from moe_ops.prep.quantise import quantise
from moe_ops.prep.requantise import requantise, to_powers_of_two
from moe_ops.prep.source import SOURCES, Source
from moe_ops.recipes import RECIPES, Recipe, get_recipe

Convert = Callable[[Source, Recipe, str], Converted]
"""(padded source, recipe, scale format) -> one prepared matrix."""


@dataclass(frozen=True)
class Path:
    """One row: how a kind of source becomes a recipe in a scale format."""

    name: str
    source: str
    recipe: str
    scale_format: str
    convert: Convert
    values: str
    """What happens to the values."""
    mixed: bool = False
    """Whether some matrices of a layer may be exact and others not."""


_KEPT, _ROUNDED = "untouched", "rounded once more; the error is reported"
_REGROUPED = "exact; tiles that would lose bits are counted"

_NAMED: dict[tuple[str, str, str], tuple[str, Convert, str]] = {
    ("mxfp4", "mxfp4", "ue8m0"): ("mxfp4", mxfp4.keep, _KEPT),
    ("mxfp4", "mxfp8", "ue8m0"): ("mxfp4_to_mxfp8", mxfp8.from_mxfp4, "exact"),
    ("mxfp4", "fp8_block", "fp32"): ("mxfp4_to_fp8", mxfp4_to_fp8.regroup, _REGROUPED),
    ("mxfp4", "fp8_block", "ue8m0"): ("mxfp4_to_fp8", mxfp4_to_fp8.regroup, _REGROUPED),
    ("mxfp8", "mxfp8", "ue8m0"): ("mxfp8", mxfp8.keep, _KEPT),
    ("fp8_block", "fp8_block", "fp32"): ("fp8_block", expand, "untouched; rounded if the block divides 128"),
    ("fp8_block", "fp8_block", "ue8m0"): ("requantise", to_powers_of_two, _ROUNDED),
    ("fp8_tensor", "fp8_block", "fp32"): ("expand", expand, _KEPT),
    ("fp8_tensor", "fp8_block", "ue8m0"): ("requantise", to_powers_of_two, _ROUNDED),
}


def _path(source: str, recipe: str, scale_format: str) -> Path:
    rest = ("quantise", quantise, "rounded once") if source == "float" else ("requantise", requantise, _ROUNDED)
    name, convert, values = _NAMED.get((source, recipe, scale_format), rest)
    mixed = convert in (mxfp4_to_fp8.regroup, to_powers_of_two)
    return Path(name, source, recipe, scale_format, convert, values, mixed)


PATHS: tuple[Path, ...] = tuple(
    _path(source, recipe.name, scale_format)
    for source in SOURCES
    for recipe in RECIPES.values()
    for scale_format in recipe.scale_formats
)
"""Every source, recipe and scale format."""


def default_recipe(source: str, device: torch.device | str) -> str:
    """The recipe that a source becomes when none is asked for: its own kind, but fp8 blocks for MXFP4 on Hopper,
    whose tensor cores have no fp4 and whose deep_gemm has no MXFP4."""
    own = {"float": "bf16", "mxfp4": "mxfp4", "mxfp8": "mxfp8"}.get(source, "fp8_block")
    return "fp8_block" if own == "mxfp4" and arch_of("default_recipe", device) == "sm90" else own


def decide(
    source: str,
    *,
    recipe: str | None = None,
    scale_format: str | None = None,
    device: torch.device | str = "cpu",
    backend: str = "auto",
    op: str = "decide",
) -> Path:
    """The path from a kind of source to what a device runs.

    Args:
        source: float, mxfp4, fp8_block, fp8_tensor, fp8_channel or mxfp8.
        recipe, scale_format: what is wanted. None: default_recipe, and arch.default_scale_format.
        device: that will run it; or a name in arch.ARCHS, to prepare on one machine for another.
        backend: that will run it; auto: any.

    Raises:
        ValueError: a name that does not exist. NotImplementedError: the backend does not read this form there.
    """
    check.one_of(op, "source", source, SOURCES)
    arch = arch_of(op, device)
    recipe = recipe or default_recipe(source, arch)
    row = get_recipe(op, recipe, scale_format)
    scale_format = scale_format or default_scale_format(row, arch)
    if not runs(recipe, scale_format, arch, backend):
        form = recipe if scale_format == "none" else f"{recipe} with {scale_format} scales"
        able = [name for name in READS if runs(recipe, scale_format, arch, name)]
        rule = f"one that reads {form} on {arch} ({', '.join(able)})"
        raise NotImplementedError(
            check.sentence(op, "backend", rule, repr(backend), "Choose one of them, or another recipe or scale format.")
        )
    return next(row for row in PATHS if (row.source, row.recipe, row.scale_format) == (source, recipe, scale_format))


def table() -> str:
    """PATHS as text: source, target, path, what happens to the values, where it is the default."""
    lines = [("source", "recipe", "scales", "path", "values", "default on")]
    for row in PATHS:
        default = []
        for arch in READS["reference"]:
            chosen = decide(row.source, device=arch)
            if chosen is row:
                default.append(arch)
        lines.append((row.source, row.recipe, row.scale_format, row.name, row.values, " ".join(default) or "-"))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )
