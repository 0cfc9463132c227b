"""One timed case: a layer's shape, a token count, a recipe, a backend. Checked before it is timed."""

import timeit
from collections.abc import Callable
from dataclasses import asdict, dataclass
from statistics import median

import torch
from torch import Tensor

from moe_ops.forward import fused_deepgemm
from moe_ops.planner import plan
from moe_ops.prep import MoEWeights
from moe_ops.recipes import get_recipe
from moe_ops.testing import random_routing, relative_error


@dataclass(frozen=True)
class Shape:
    """Experts on this rank, hidden size, intermediate size, routes a token."""

    name: str
    E: int
    K: int
    I: int
    top_k: int


SHAPES = (
    Shape("qwen3-30b-a3b", 128, 2048, 768, 8),
    Shape("deepseek-v3-ep8", 32, 7168, 2048, 8),
    Shape("tiny", 8, 256, 128, 2),
)


@dataclass(frozen=True)
class Timing:
    """Microseconds of one forward: median, and the middle 60 % of the repeats."""

    shape: str
    T: int
    recipe: str
    scale_format: str
    layout: str
    backend: str
    us: float
    p20: float
    p80: float
    floor_us: float | None
    """Bytes of the touched experts' weights over the measured copy rate, or operations over the measured fp8 rate."""
    error: float
    """Relative to the reference backend on the same tensors."""
    scratch_mib: float

    def row(self) -> dict:
        return asdict(self)


def time_layer(
    shape: Shape, T: int, weights: MoEWeights, backend: str, layout: str, rates: tuple[float, float] | None
) -> Timing:
    """Checks the layer against the reference backend, then times it. rates: (bytes/s, operations/s) for the floor."""
    device = weights.w13.device
    generator = torch.Generator().manual_seed(T)
    routing = random_routing(T, shape.E, shape.top_k, "uniform", generator)
    x = torch.randn(T, shape.K, generator=generator).bfloat16()
    inputs = tuple(t.to(device) for t in (x, *routing))
    sizes = dict(T=T, E=shape.E, K=shape.K, I=shape.I, top_k=shape.top_k)
    planned = plan(**sizes, recipe=weights.recipe, layout=layout, scale_format=weights.scale_format)

    def run(backend: str) -> Tensor:
        arguments = dict(recipe=weights.recipe, layout=layout, backend=backend)
        return fused_deepgemm(*inputs, **weights.tensors(), **arguments)  # type: ignore[arg-type]

    error = relative_error(run(backend), run("reference"))
    allowed = get_recipe("bench", weights.recipe).max_diff
    if not error <= allowed:
        raise AssertionError(f"bench: {shape.name} T={T} {weights.recipe} {backend}: error {error:.3f} above {allowed}")
    times = sorted(_replays(lambda: run(backend)) if device.type == "cuda" else _calls(lambda: run(backend)))
    floor = None
    if rates is not None:
        touched = len(routing[1].unique())
        element = weights.w13.element_size() / get_recipe("bench", weights.recipe).w_pack
        moved = touched * 3 * shape.I * shape.K * element / rates[0]
        floor = 1e6 * max(moved, 6 * T * shape.top_k * shape.I * shape.K / rates[1])
    return Timing(
        shape.name,
        T,
        weights.recipe,
        weights.scale_format,
        planned.layer.layout,
        backend,
        median(times),
        times[len(times) // 5],
        times[len(times) * 4 // 5],
        floor,
        error,
        planned.total_bytes / 2**20,
    )


def _calls(run: Callable) -> list[float]:
    timer = timeit.Timer(run)
    run()
    return [1e6 * seconds / 3 for seconds in timer.repeat(repeat=10, number=3)]


def _replays(run: Callable, repeats: int = 20) -> list[float]:
    """Device time of replays of one captured forward."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    times = []
    for _ in range(repeats + 3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1e3 * start.elapsed_time(end))
    return times[3:]


def measured_rates() -> tuple[float, float]:
    """(bytes/s of a large copy, counting read and write; operations/s of a large fp8 product) on this card."""
    big = torch.empty(1 << 30, dtype=torch.float32, device="cuda").normal_()
    other = torch.empty_like(big)
    copy = median(_replays(lambda: torch.add(big, 0.0, out=other)))  # a kernel's rate; the copy engine is slower
    n = 8192
    a, b = (torch.randn(n, n, device="cuda").to(torch.float8_e4m3fn) for _ in range(2))
    one = torch.ones((), device="cuda")
    product = median(_replays(lambda: torch._scaled_mm(a, b.t(), one, one, out_dtype=torch.bfloat16)))
    return 2 * big.nbytes / (copy * 1e-6), 2 * n**3 / (product * 1e-6)
