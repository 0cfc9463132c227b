"""The whole benchmark: which rows, in which order, printed and written as they come."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from moe_ops import arch
from moe_ops.bench.cases import RECIPE_NAMES, REPACKED, SHAPES, Case, Shape, layer_weights
from moe_ops.bench.compare import time_peer
from moe_ops.bench.layer import Row, compare_work, nowhere_us, one_line, time_layer
from moe_ops.bench.peers import peers_of
from moe_ops.bench.report import Report
from moe_ops.bench.routing import ROUTINGS
from moe_ops.bench.timing import QUICK, Effort, measured_rates

TOKENS = (1, 8, 64, 512, 4096, 16384)


def bench(
    *,
    shape: Sequence[str] | None = None,
    recipe: Sequence[str] | None = None,
    tokens: Sequence[int] | None = None,
    backend: Sequence[str] = ("auto",),
    layout: Sequence[str] = ("auto",),
    routing: Sequence[str] = ("uniform",),
    peers: bool = False,
    quick: bool = False,
    profile: bool = False,
    json_path: str | None = None,
    plot: str | None = None,
    time_limit: float | None = None,
    say: Callable[[str], Any] = print,
) -> Report:
    """Times layers on this machine, the most asked-for first; what is measured is printed and written at once.

    Args:
        shape: names in cases.SHAPES. None: the two large ones on a card, the tiny one on a CPU.
        recipe: names in cases.RECIPE_NAMES. None: those that run here.
        tokens: None: TOKENS on a card; 1, 8 and 64 on a CPU.
        backend, layout: as in fused_deepgemm; each is timed.
        routing: names in routing.ROUTINGS. Others than uniform are compared with it at equal work.
        peers: other libraries' layers too, under uniform routing.
        quick: 20 readings of everything, no cold and no Triton-only column.
        profile: the kernels of one replay of each row.
        json_path, plot: files to write: the report after every row, the roofline chart at the end.
        time_limit: seconds from now after which no new row is started.

    Returns:
        The report. `failures` in it says which of this package's own rows were wrong or did not run.
    """
    cuda = torch.cuda.is_available()
    device = torch.device("cuda" if cuda else "cpu")
    names = [one.name for one in SHAPES]
    shapes = _named(shape or (names[:2] if cuda else names[2:]))
    recipe = recipe or [name for name in RECIPE_NAMES if _usual(name, device)]
    tokens = tokens or (TOKENS if cuda else TOKENS[:3])
    # Rows that others are compared with come first, whatever the order they were asked in.
    kinds = sorted({"uniform", *routing}, key=ROUTINGS.index)
    effort = QUICK if quick else Effort()
    deadline = None if time_limit is None else time.monotonic() + time_limit
    report = Report.of_this_machine(measured_rates(effort) if cuda else None, json_path, say)
    options = dict(columns=not quick, kernels=profile)
    for name in sorted(recipe, key=RECIPE_NAMES.index):
        weights = {}
        for one in shapes:
            try:
                weights[one] = layer_weights(one, name, device)
            except Exception as error:  # such as a repacking that this shape cannot have
                report.fail(f"{one.name} {name}: {one_line(error)}")
        cases = [Case(one, T, name, weights[one]) for one in weights for T in tokens]
        for case in _in_time(cases, deadline, report):
            for asked in backend:
                for wanted in layout:
                    _time(case, kinds, asked, wanted, effort, report, options)
        for case in _in_time(cases if peers else [], deadline, report):
            for kind in peers_of(name):
                report.add_peer(time_peer(kind, case, effort))
                _free()
        del weights, cases
        _free()
    if plot is not None:
        from moe_ops.bench.plot import draw

        draw(report.asdict(), plot)
    return report


def _time(case: Case, kinds: list[str], backend: str, layout: str, effort: Effort, report: Report, options) -> None:
    """This case under each routing, uniform first."""
    uniform: Row | None = None
    for kind in kinds:
        skewed = replace(case, routing=kind)
        try:
            row = time_layer(skewed, backend, layout, report.rates, effort, **options)
            if kind == "uniform":
                uniform = row
            elif uniform is not None and row.floor_us is not None:
                row = compare_work(row, uniform, nowhere_us(case, backend, layout, effort))
            report.add(row)
            if row.over_plan:
                report.fail(f"the row above: {row.peak_mib:.2f} MiB of memory, planned {row.plan_mib:.2f}")
        except Exception as error:  # the next row may well run; the exit code remembers
            report.fail(f"{case.shape.name} T={case.T} {case.recipe} {kind} {backend} {layout}: {one_line(error)}")
        _free()


def _in_time(cases: list[Case], deadline: float | None, report: Report) -> Iterator[Case]:
    for index, case in enumerate(cases):
        if deadline is not None and time.monotonic() > deadline:
            report.note(f"{case.recipe}: out of time, {len(cases) - index} cases from {case.shape.name} T={case.T} on")
            return
        yield replace(case)  # its tensors go when it was timed


def _named(names: Sequence[str]) -> list[Shape]:
    return [one for one in SHAPES if one.name in names]


def _usual(recipe: str, device: torch.device) -> bool:
    return not recipe.endswith(REPACKED) or arch.arch_of("bench", device) == "sm90"


def _free() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
