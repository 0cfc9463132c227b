"""moe-ops simulate: a layer over many ranks on paper."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from moe_ops import arch as archs
from moe_ops import check
from moe_ops.cli import sizes
from moe_ops.cli.screen import stderr, stdout, table
from moe_ops.parallel import ParallelSizes
from moe_ops.recipes import get_recipe
from moe_ops.rows import align
from moe_ops.simulate import Links, Scenario, TimeTable, advice, popularity_of, predict_all, show

EXAMPLE = "moe-ops simulate -E 256 -K 7168 -I 2048 --top-k 8 --world 64 -T 128"
MOST_RANKS = 1024
_DEFAULT = Links()


def run(
    config: sizes.Config = None,
    experts: sizes.Experts = None,
    hidden: sizes.Hidden = None,
    intermediate: sizes.Intermediate = None,
    top_k: sizes.TopK = None,
    recipe: sizes.Recipe = "fp8_block",
    tokens: Annotated[int, typer.Option("--tokens", "-T", help="Tokens of a rank; of its attention-TP group.")] = 128,
    max_tokens: Annotated[int | None, typer.Option(help="Capacity of a rank. Default: what the tokens need.")] = None,
    world: Annotated[int, typer.Option(help="Ranks, up to 1024.")] = 8,
    attn_tp: Annotated[int, typer.Option(help="Ranks that have the same tokens.")] = 1,
    moe_tp: Annotated[int, typer.Option(help="Ranks that share one expert's intermediate size.")] = 1,
    routing: Annotated[str, typer.Option(help="uniform, zipf, or a JSON list of counts, one an expert.")] = "uniform",
    seed: Annotated[int, typer.Option(help="Of the routing that is drawn.")] = 0,
    node: Annotated[int, typer.Option(help="Ranks of a node.")] = _DEFAULT.per_node,
    intra: Annotated[float, typer.Option(help="GB/s a rank and direction in a node (assumed).")] = _DEFAULT.intra,
    inter: Annotated[float, typer.Option(help="GB/s a rank and direction across (assumed).")] = _DEFAULT.inter,
    latency: Annotated[float, typer.Option(help="Microseconds of one exchange (assumed).")] = _DEFAULT.latency_us,
    times: Annotated[Path | None, typer.Option("--table", help="Layer times: JSON of the benchmark.")] = None,
    arch: Annotated[str, typer.Option(help="sm90, sm100 or sm120: of the layouts and scales.")] = "sm90",
    captured: Annotated[bool, typer.Option("--captured", help="A graph shall hold it: no host counts.")] = False,
    memory: Annotated[float | None, typer.Option(help="GiB that a layer may take on a rank.")] = None,
    chart: Annotated[Path | None, typer.Option(help="Draw times and balance to this file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of the table.")] = False,
) -> None:
    """Predict memory, bytes, time and balance of every dispatch format, from sizes alone."""
    op = "simulate"
    given: dict[str, Any] = dict(E=experts, K=hidden, I=intermediate, top_k=top_k)
    parallel = _parallel(op, world, attn_tp, moe_tp)
    found = sizes.read(op, config, recipe, parallel.ep, **given)
    for note in found.padded:
        stderr().print(note, soft_wrap=True)
    row = get_recipe(op, recipe)
    links, measured = Links(node, intra, inter, latency), TimeTable.load(times)
    measured.check(recipe)
    check.value(tokens >= 0, op, "tokens", "at least 0", tokens, "It counts them.")
    need = max(1, -(-tokens // attn_tp)) if attn_tp > 1 and moe_tp == 1 else max(1, tokens)
    scenario = Scenario.drawn(
        popularity_of(routing, found.num_experts, seed),
        tokens,
        seed,
        sizes=parallel,
        num_experts=found.num_experts,
        K=found.K,
        I=align(found.I, row.granule * moe_tp) // moe_tp,
        top_k=found.top_k,
        recipe=recipe,
        scale_format=archs.default_scale_format(row, arch),
        max_tokens=need if max_tokens is None else max_tokens,
        per_node=node,
        captured=captured,
        arch=arch,
    )
    rows = predict_all(scenario, links, measured)
    best, why = advice(rows, None if memory is None else int(memory * 2**30))
    load = show.load(scenario)
    inside = measured.measured(recipe, load["mean_rows"] / scenario.each, found.K, scenario.I)
    assumed = _assumptions(links, measured, inside)
    if chart is not None:
        show.chart(rows, scenario, str(chart))
        stderr().print(f"drawn to {chart}", soft_wrap=True, markup=False)
    if as_json:
        use: Any = None if best is None else dict(format=best.format, wire=best.wire, layout=best.layout, why=why)
        answer = dict(assumptions=assumed, load=load, formats=[show.as_dict(r, links) for r in rows], use=use)
        print(json.dumps(answer, indent=1))
        return
    console = stdout()
    head = f"{parallel}, {tokens} tokens, E={found.num_experts} K={found.K} I={scenario.I} top_k={found.top_k} {recipe}"
    shown = table(head, *show.COLUMNS, right=show.COLUMNS[3:])
    for line in rows:
        if line.refused is None:
            shown.add_row(*show.cells(line, links))
    console.print(shown)
    for line in rows:
        if line.refused is not None:
            console.print(f"{line.format} ({line.wire}): {line.refused}", soft_wrap=True, markup=False)
    fullest = f"rank {load['slowest_rank']}: {load['rows']} rows, {load['over_mean']:.2f} times the mean"
    console.print(f"slowest: {fullest}", soft_wrap=True)
    slabs = next((line for line in rows if line.refused is None and line.layout == "masked" and line.filled < 1), None)
    if slabs is not None:
        console.print(f"capacity: the fullest expert fills {100 * slabs.filled:.0f} % of its slab", soft_wrap=True)
    named = why if best is None else f"{best.format} over {best.wire}, {best.layout} layout: {why}"
    console.print(f"use: {named}", soft_wrap=True)
    for line in assumed:
        console.print(f"assumed: {line}", soft_wrap=True, markup=False)


def _parallel(op: str, world: int, attn_tp: int, moe_tp: int) -> ParallelSizes:
    check.value(1 <= world <= MOST_RANKS, op, "world", f"in [1, {MOST_RANKS}]", world, "Choose fewer ranks.")
    for name, size in (("attn_tp", attn_tp), ("moe_tp", moe_tp)):
        fits = size >= 1 and world % size == 0
        check.value(fits, op, name, f"a divisor of world={world}", size, "Groups of ranks are equal.")
    return ParallelSizes(attn_dp=world // attn_tp, attn_tp=attn_tp, ep=world // moe_tp, moe_tp=moe_tp)


def _assumptions(links: Links, measured: TimeTable, inside: bool) -> list[str]:
    lines = [
        f"links: {links.intra:g} GB/s a rank and direction in a node of {links.per_node}, {links.inter:g} GB/s across, "
        f"{links.latency_us:g} us an exchange; nominal unless you measured them",
        f"GEMMs: whole layers timed on {measured.name}, carried over to these sizes; the same for every format",
        "dispatch, GEMMs and combine one after another; sorting, quantising and host reads beside them take no time",
        "bytes over deep_ep: its kernels' messages as read in its source, not measured; its buffers are not counted",
    ]
    if not inside:
        lines.append("the mean rows an expert are outside of what was timed: the nearest ratio to the floor is kept")
    return lines
