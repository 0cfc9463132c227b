"""moe-ops warmup: compiles the kernels of a layer before the first request."""

from typing import Annotated, Any

import typer

import moe_ops
from moe_ops.arch import here
from moe_ops.cli import sizes
from moe_ops.cli.random_layer import random_layer
from moe_ops.cli.screen import stdout

EXAMPLE = "moe-ops warmup --config ./Qwen3-30B-A3B -T 1 -T 64 -T 4096 --recipe fp8_block"
Counts = Annotated[list[int], typer.Option("--tokens", "-T", help="Tokens of one call; may be repeated.")]


def run(
    tokens: Counts,
    config: sizes.Config = None,
    experts: sizes.Experts = None,
    hidden: sizes.Hidden = None,
    intermediate: sizes.Intermediate = None,
    top_k: sizes.TopK = None,
    world: sizes.World = 1,
    recipe: sizes.Recipe = "fp8_block",
    layout: sizes.Layout = "auto",
    backend: sizes.Backend = "auto",
    workers: Annotated[int | None, typer.Option(help="Processes. Default: 4 on a card, else none.")] = None,
) -> None:
    """Compile what a layer of these sizes needs for these token counts; later processes find it in the caches.

    Each kind of call runs once on random tokens. What was done before is not done again.
    """
    given: dict[str, Any] = dict(E=experts, K=hidden, I=intermediate, top_k=top_k)
    found = sizes.read("warmup", config, recipe, world, **given)
    device = here()
    layer = random_layer(found, recipe, layout, backend, device)
    report = moe_ops.warmup(layer, tokens, workers=workers)
    stdout().print(f"{report.compiled} kinds of calls run, {report.found} found done, on {device.type}.")
    if device.type == "cpu":
        stdout().print("A CPU compiles nothing: the reference is plain torch.")
