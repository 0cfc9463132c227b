"""One timed row: checked against the reference, then timed; its memory held against its plan."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from moe_ops.bench.cases import SHAPES, Case, Shape
from moe_ops.bench.routing import NOWHERE
from moe_ops.bench.timing import Effort, Graph, Rates, Times, recorded
from moe_ops.testing import relative_error

__all__ = ["SHAPES", "Row", "Shape", "time_layer"]

_MIB = 2**20


@dataclass(frozen=True)
class Row:
    """Microseconds of one forward (median, bounds of the middle 60 %), what it was, and what it could have been."""

    shape: str
    T: int
    recipe: str
    scale_format: str
    routing: str
    layout: str
    """That was taken."""
    backend: str
    """That was asked for."""
    us: float
    p20: float
    p80: float
    burst_us: float | None
    """Of the first replays after a pause. None: not on a card."""
    cold_us: float | None
    """With nothing of the layer in the L2 cache. None: not measured."""
    triton_us: float | None
    """With backend="triton"."""
    floor_us: float | None
    touched: int
    """Experts with work."""
    weight_bytes: float
    operations: int
    error: float
    """Relative to the reference backend on the same tensors, over the tokens compared."""
    compared: int
    """Tokens."""
    plan_mib: float
    """Workspace of the plan and the result."""
    peak_mib: float | None
    """What one eager forward asked the allocator for above its inputs. None: not on a card."""
    equal_work: float | None = None
    """Time over that of uniform routing at equal work (see expected_us). None: it is uniform."""
    kernels: tuple[dict, ...] = ()
    """Of one replay, the longest first."""
    notes: tuple[str, ...] = ()
    """Columns that are missing, and why."""

    @property
    def over_plan(self) -> bool:
        """Whether it took more memory than planned."""
        return self.peak_mib is not None and self.peak_mib > self.plan_mib

    def asdict(self) -> dict:
        return asdict(self)


class WrongLayer(AssertionError):
    """The layer is not timed: its result is not what it must be."""


def time_layer(
    case: Case,
    backend: str,
    layout: str,
    rates: Rates | None,
    effort: Effort,
    *,
    columns: bool = True,
    kernels: bool = False,
) -> Row:
    """One row of the table. columns: also cold and Triton-only times. kernels: also a profile of one replay.

    Raises:
        WrongLayer: its error is above the recipe's max_diff.
    """
    error = _checked(case, backend, layout)
    planned = case.plan(backend, layout)
    peak = peak_bytes(case, backend, layout)
    allowed = planned.total_bytes + case.inputs[0].nbytes
    notes: list[str] = []
    recording = recorded(lambda: case.run(backend, layout), case.device)
    times = recording.times(effort)
    burst = recording.burst(effort)
    cold = _column("cold", notes, recording.cold, effort) if columns else None
    profiled = _column("kernels", notes, recording.kernels) if kernels else None
    del recording
    triton = _column("triton", notes, _triton, case, backend, layout, times, effort) if columns else None
    return Row(
        case.shape.name,
        case.T,
        case.recipe,
        case.weights.scale_format,
        case.routing,
        planned.layer.layout,
        backend,
        times.us,
        times.p20,
        times.p80,
        Times.us_of(burst),
        Times.us_of(cold),
        Times.us_of(triton),
        None if rates is None else case.floor_us(rates),
        case.touched,
        case.weight_bytes,
        case.operations,
        error,
        len(case.expected),
        allowed / _MIB,
        None if peak is None else peak / _MIB,
        kernels=tuple(profiled or ()),
        notes=tuple(notes),
    )


def peak_bytes(case: Case, backend: str, layout: str) -> int | None:
    """Bytes that one eager forward asks the allocator for above what was there, at most at one time."""
    if case.device.type != "cuda":
        return None
    case.run(backend, layout)  # compiles, and looks for libraries
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    out = case.run(backend, layout)
    torch.cuda.synchronize()
    peak = torch.cuda.memory_stats()["requested_bytes.all.peak"] - before
    del out
    return peak


def compare_work(row: Row, uniform: Row, nowhere_us: float) -> Row:
    """The row of a skewed routing, beside uniform routing at equal work."""
    return replace(row, equal_work=row.us / expected_us(row, uniform, nowhere_us))


def expected_us(row: Row, uniform: Row, nowhere_us: float) -> float:
    """What uniform routing would take for this row's work: the part of its time that is not there without routes,
    scaled by the two floors."""
    assert row.floor_us is not None and uniform.floor_us is not None
    return nowhere_us + (uniform.us - nowhere_us) * row.floor_us / uniform.floor_us


def nowhere_us(case: Case, backend: str, layout: str, effort: Effort) -> float:
    """Time of the same call when no token is routed to any expert."""
    idle = replace(case, routing=NOWHERE)
    return recorded(lambda: idle.run(backend, layout), case.device).times(effort).us


def _checked(case: Case, backend: str, layout: str) -> float:
    error = relative_error(case.of_checked(case.run(backend, layout)), case.expected)
    if not error <= case.format.max_diff:
        raise WrongLayer(f"{_name(case, backend)}: error {error:.3f} above {case.format.max_diff}")
    return error


def _triton(case: Case, backend: str, layout: str, times: Times, effort: Effort) -> Times | None:
    if case.device.type != "cuda":
        return None
    if case.plan("triton", layout).layout_rule == case.plan(backend, layout).layout_rule != "as asked":
        return times  # the same row of the table: the same kernels
    _checked(case, "triton", layout)
    return Graph(lambda: case.run("triton", layout)).times(effort)


def _column(name: str, notes: list[str], measure: Callable, *arguments) -> Any:
    """A column that fails is missing, and says so; the row stays."""
    try:
        return measure(*arguments)
    except Exception as error:  # another library, a profiler or the driver may raise anything
        notes.append(f"{name}: {one_line(error)}")
        return None


def one_line(error: BaseException) -> str:
    """An exception as one line of a table."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:200]


def _name(case: Case, backend: str) -> str:
    return f"bench: {case.shape.name} T={case.T} {case.recipe} {backend}"
