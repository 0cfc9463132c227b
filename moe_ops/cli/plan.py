"""moe-ops plan: every byte of a forward's scratch memory, as a table, a picture or JSON."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

import moe_ops
from moe_ops import arch as archs
from moe_ops.cli import sizes
from moe_ops.cli.screen import stderr, stdout
from moe_ops.plan_text import table
from moe_ops.planner import BufferPlan
from moe_ops.recipes import get_recipe

EXAMPLE = "moe-ops plan -E 256 -K 7168 -I 2048 --top-k 8 --world 8 -T 4096 --arch sm90 --chart plan.png"


def run(
    config: sizes.Config = None,
    experts: sizes.Experts = None,
    hidden: sizes.Hidden = None,
    intermediate: sizes.Intermediate = None,
    top_k: sizes.TopK = None,
    tokens: sizes.Tokens = 1024,
    world: sizes.World = 1,
    recipe: sizes.Recipe = "fp8_block",
    layout: sizes.Layout = "auto",
    arch: Annotated[str | None, typer.Option(help="cpu, sm90, sm100 or sm120. Default: this machine.")] = None,
    chart: Annotated[Path | None, typer.Option(help="Draw address over stage to this file (png, svg, pdf).")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of the table.")] = False,
) -> None:
    """Print where every buffer of a forward lies in its workspace, and for how long."""
    given: dict[str, Any] = dict(E=experts, K=hidden, I=intermediate, top_k=top_k)
    found = sizes.read("plan", config, recipe, world, **given)
    device = arch or archs.here()
    scale_format = archs.default_scale_format(get_recipe("plan", recipe), device)
    options: dict[str, Any] = dict(
        recipe=recipe, scale_format=scale_format, layout=layout, num_experts=found.num_experts, arch=arch
    )
    plan = moe_ops.plan(T=tokens, **found.here, **options)
    for note in found.padded:
        stderr().print(note, soft_wrap=True)
    console = stdout()
    if as_json:
        print(json.dumps(_as_dict(plan), indent=1))
    else:
        print(table(plan, console.width if console.is_terminal else None))
    if chart is not None:
        plan.draw(str(chart))
        stderr().print(f"drawn to {chart}", soft_wrap=True, markup=False)


def _as_dict(plan: BufferPlan) -> dict:
    names = ("T", "top_k", "E", "K", "I", "recipe", "scale_format", "layout", "num_experts")
    buffers = [buffer.asdict() for buffer in plan.buffers]
    totals = ("total_bytes", "lower_bound_bytes", "unplanned_bytes", "workspace_bytes", "layout_rule")
    layer = {name: getattr(plan.layer, name) for name in names}
    return {"layer": layer, **{name: getattr(plan, name) for name in totals}, "buffers": buffers}
