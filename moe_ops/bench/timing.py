"""How long something takes: device time of CUDA graph replays; on a CPU, wall time of calls."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor

from moe_ops.capture import capture_stream


@dataclass(frozen=True)
class Times:
    """Microseconds: the median of the readings, and the bounds of their middle 60 %."""

    us: float
    p20: float
    p80: float

    @classmethod
    def us_of(cls, times: "Times | None") -> float | None:
        """None of what was not measured."""
        return None if times is None else times.us

    @classmethod
    def of(cls, readings: list[float]) -> "Times":
        ordered = sorted(readings)
        last = len(ordered) - 1
        return cls(median(ordered), ordered[round(0.2 * last)], ordered[round(0.8 * last)])


@dataclass(frozen=True)
class Effort:
    """How long to work before the first reading, and how many readings to take."""

    warm_up: float = 0.25
    """Seconds of replays: before that, a card's clocks are still those of idleness or of the first burst."""
    least: int = 20
    most: int = 200
    pause: float = 0.3
    """Seconds of idleness before a burst: what a card that draws its limit of power needs to take full clocks again."""
    seconds: float = 0.02
    """Short graphs are read more often than `least`: until so much of them has run."""

    def readings(self, us: float) -> int:
        return max(self.least, min(self.most, int(1e6 * self.seconds / max(us, 1.0))))


QUICK = Effort(most=20)


class Graph:
    """One captured call on a CUDA card. `result` is what it returned: every replay writes it anew."""

    def __init__(self, run: Callable[[], Any]):
        stream = capture_stream(torch.device("cuda"))
        stream.warm_up(run, times=3)
        self._graph, self.result = stream.capture(run)
        self.replay = self._graph.replay

    def times(self, effort: Effort) -> Times:
        """Weights and activations are where the replay before left them."""
        return Times.of(self._readings(effort.readings(self._warm_up(effort))))

    def burst(self, effort: Effort) -> Times | None:
        """The first replays after a pause, at the clocks that a card takes before it reaches its limit of power."""
        torch.cuda.synchronize()
        time.sleep(effort.pause)
        return Times.of(self._readings(effort.least))

    def cold(self, effort: Effort) -> Times | None:
        """The L2 holds nothing of the layer: each replay comes after a write longer than it."""
        flush = torch.empty(4 * _l2_bytes(), dtype=torch.uint8, device="cuda")
        self._warm_up(effort)
        return Times.of(self._readings(effort.least, flush.zero_))

    def kernels(self) -> list[dict]:
        """What one replay consists of, the longest kernel first: name, microseconds, calls."""
        from torch.profiler import ProfilerActivity, profile

        self._graph.replay()
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as profiled:
            self._graph.replay()
            torch.cuda.synchronize()
        found = [
            dict(name=event.key, us=event.self_device_time_total, calls=event.count)
            for event in profiled.key_averages()
            if event.self_device_time_total > 0
        ]
        return sorted(found, key=lambda kernel: -kernel["us"])

    def _warm_up(self, effort: Effort) -> float:
        """Replays for effort.warm_up seconds; returns the microseconds of one, roughly."""
        self._graph.replay()
        torch.cuda.synchronize()
        start, batch, done = time.perf_counter(), 1, 0
        while (passed := time.perf_counter() - start) < effort.warm_up:
            for _ in range(batch):
                self._graph.replay()
            torch.cuda.synchronize()
            done += batch
            batch = min(2 * batch, max(1, int(0.02 * done / (time.perf_counter() - start))))
        return 1e6 * passed / max(done, 1)

    def _readings(self, count: int, before: Callable[[], Any] | None = None) -> list[float]:
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        readings = []
        for _ in range(count + 3):
            if before is not None:
                before()
                torch.cuda.synchronize()  # else the launch would hide behind it, unlike in the other column
            events[0].record()
            self._graph.replay()
            events[1].record()
            events[1].synchronize()
            readings.append(1e3 * events[0].elapsed_time(events[1]))
        return readings[3:]


class Calls:
    """The same questions about a call on a CPU, where neither graphs nor a flush of the caches are to be had."""

    def __init__(self, run: Callable[[], Any]):
        self._run = run
        self.result = run()

    def times(self, effort: Effort) -> Times:
        """effort.warm_up bounds the whole: plain torch has no clocks to wait for, and is slow."""
        readings: list[float] = []
        start = time.perf_counter()
        while len(readings) < 3 or (len(readings) < effort.least and time.perf_counter() - start < effort.warm_up):
            before = time.perf_counter()
            self._run()
            readings.append(1e6 * (time.perf_counter() - before))
        return Times.of(readings)

    def burst(self, effort: Effort) -> Times | None:
        return None

    def cold(self, effort: Effort) -> Times | None:
        return None

    def kernels(self) -> list[dict]:
        return []


def recorded(run: Callable[[], Tensor], device: torch.device) -> Graph | Calls:
    """What can be timed of this call on this device."""
    return Graph(run) if device.type == "cuda" else Calls(run)


@dataclass(frozen=True)
class Rates:
    """What this card was measured to do."""

    copy: float
    """Bytes a second of a large copy by a kernel, read and written bytes both counted."""
    bf16: float
    fp8: float
    """Operations a second of a large matrix product with random operands."""
    replay_us: float
    """A replay of a graph with one tiny kernel: contained in every time."""


def measured_rates(effort: Effort) -> Rates:
    """Takes about 9 GiB for its time."""
    rates = Rates(_copy_rate(effort), *_product_rates(effort), _replay_us(effort))
    torch.cuda.empty_cache()
    return rates


def _copy_rate(effort: Effort) -> float:
    big = torch.empty(1 << 30, dtype=torch.float32, device="cuda").normal_()
    other = torch.empty_like(big)
    copy = Graph(lambda: torch.add(big, 0.0, out=other))  # the copy engine is slower than a kernel
    return 1e6 * 2 * big.nbytes / copy.times(effort).us


def _product_rates(effort: Effort, n: int = 8192) -> tuple[float, float]:
    """bf16, fp8."""
    a, b = (torch.randn(n, n, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    a8, b8, one = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn), torch.ones((), device="cuda")
    wide = Graph(lambda: a @ b.t())
    narrow = Graph(lambda: torch._scaled_mm(a8, b8.t(), one, one, out_dtype=torch.bfloat16))
    return 1e6 * 2 * n**3 / wide.times(effort).us, 1e6 * 2 * n**3 / narrow.times(effort).us


def _replay_us(effort: Effort) -> float:
    tiny = torch.zeros(1, device="cuda")
    return Graph(lambda: tiny.add_(1)).times(effort).us


def _l2_bytes() -> int:
    return torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
