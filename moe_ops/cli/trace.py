"""moe-ops trace: one forward as a Chrome trace and as a table of time by op."""

from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch.profiler import ProfilerActivity, profile

from moe_ops import check
from moe_ops.arch import here
from moe_ops.cli import sizes
from moe_ops.cli.random_layer import random_layer
from moe_ops.cli.screen import stderr, stdout, table

EXAMPLE = "moe-ops trace trace.json -T 64 --recipe mxfp8"
_SMALL = dict(E=8, K=256, I=128, top_k=2)


def run(
    file: Annotated[Path, typer.Argument(help="Chrome trace to write: open it in ui.perfetto.dev.")],
    config: sizes.Config = None,
    experts: sizes.Experts = None,
    hidden: sizes.Hidden = None,
    intermediate: sizes.Intermediate = None,
    top_k: sizes.TopK = None,
    tokens: sizes.Tokens = 64,
    world: sizes.World = 1,
    recipe: sizes.Recipe = "fp8_block",
    layout: sizes.Layout = "auto",
    backend: sizes.Backend = "auto",
) -> None:
    """Profile one forward with random weights; every stage is an op `moe::...` in the trace.

    Sizes that are given nowhere are those of a small layer: E=8, K=256, I=128, top_k=2.
    """
    check.value(tokens >= 0, "trace", "tokens", "at least 0", tokens, "It counts tokens.")
    check.value(file.parent.is_dir(), "trace", "file", "in a folder that exists", file, "Make the folder first.")
    given: dict[str, Any] = dict(E=experts, K=hidden, I=intermediate, top_k=top_k)
    found = sizes.read("trace", config, recipe, world, _SMALL if config is None else None, **given)
    device = here()
    layer = random_layer(found, recipe, layout, backend, device)
    x = torch.randn(tokens, found.K, dtype=torch.bfloat16, device=device)
    with torch.no_grad():
        for _ in range(2):  # compiles, and looks for libraries
            layer(x)
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
        with profile(activities=activities) as profiler:
            layer(x)
            if device.type == "cuda":
                torch.cuda.synchronize()
    profiler.export_chrome_trace(str(file))
    right = ("us", "of all")
    shown = table(f"{tokens} tokens, {recipe}, on {device.type}", "op", *right, right=right)
    times = _times(profiler, device.type == "cuda")
    whole = sum(times.values()) or 1.0
    for name, us in times.items():
        shown.add_row(name, f"{us:.1f}", f"{us / whole:.0%}")
    stdout().print(shown)
    stderr().print(f"trace written to {file}", soft_wrap=True, markup=False)


def _times(profiler: profile, cuda: bool) -> dict[str, float]:
    """Op -> microseconds, in the order of the calls: of the device on a card, else of the CPU.

    The composite fused_deepgemm holds the others' time and is left out.
    """
    found: dict[str, float] = {}
    events = sorted(profiler.events() or (), key=lambda event: event.time_range.start)
    for event in events:
        if event.name.startswith("moe::") and event.name != "moe::fused_deepgemm":
            us = event.device_time_total if cuda else event.cpu_time_total
            found[event.name] = found.get(event.name, 0.0) + us
    return found
