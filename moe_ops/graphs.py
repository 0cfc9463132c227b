"""GraphedDecode: a decode step captured as CUDA graphs for a few token counts, replayed for every count up to them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from moe_ops import check
from moe_ops.capture import capture_stream

_OP = "GraphedDecode"
MODES = ("graph", "eager")


@dataclass(frozen=True)
class Capture:
    """One captured token count."""

    tokens: int
    pool_bytes: int
    """Of the pool that all captures share, after this one."""
    growth_bytes: int
    """By which this capture made the pool grow."""


class GraphedDecode:
    """A step over up to max(buckets) tokens, padded to the next bucket and replayed from its graph.

    The step is called as `step(*tensors, num_token_non_padded=n)`: tensors of `bucket` tokens each, and n (), int32 on
    the device, the tokens among them that are real. MoELayer takes it and hands it to its router, which gives padding
    the expert -1 before anything is counted, so that no expert computes it. What else the step does must treat tokens
    apart, or look at n.

    The largest bucket is captured first, so that smaller ones find room in what it took. Results lie in memory of the
    graphs: the next call overwrites them. Capture after the last Workspace.grow(), and after moe_ops.warmup. Warm-ups
    run on the stream that captures, so that the pool holds activations alone; cuBLAS's scratch is that of all captures
    on the card, so two GraphedDecode are called one after another, not on two streams at once.

    Args:
        step: what is captured. It returns a tensor, or a nest of tensors, of `bucket` rows each.
        examples: tensors of at least one row; axis 0 counts tokens, the rest, dtype and device are those of every call.
        buckets: the token counts to capture.
        mode: graph, or eager: padded and called alike, without graphs, on any device.
        pad_values: what fills the rows of padding, one for each tensor; None: zeros. A step that writes to a cache slot
            a token needs a slot for padding.

    Raises:
        ValueError: no buckets; mode graph without a CUDA card.
    """

    def __init__(
        self,
        step: Callable[..., Any],
        examples: Sequence[Tensor],
        *,
        buckets: Sequence[int] = (1, 2, 4, 8, 16, 32, 64),
        mode: str = "graph",
        pad_values: Sequence[float] | None = None,
    ):
        self.buckets = tuple(sorted(set(buckets)))
        ok = bool(self.buckets) and self.buckets[0] >= 1
        check.value(ok, _OP, "buckets", "token counts of at least 1", tuple(buckets), "Pass the sizes to capture.")
        check.value(len(examples) > 0, _OP, "examples", "at least one tensor", 0, "Pass what the step takes.")
        check.one_of(_OP, "mode", mode, MODES)
        device = examples[0].device
        fix = "Pass mode='eager' to run without graphs, or tensors on the card."
        check.value(mode == "eager" or device.type == "cuda", _OP, "mode", "eager off a CUDA card", repr(mode), fix)
        self.step, self.mode = step, mode
        self._pads = tuple(pad_values) if pad_values is not None else (0,) * len(examples)
        rule, got = f"one value for each of {len(examples)} tensors", len(self._pads)
        check.value(got == len(examples), _OP, "pad_values", rule, got, "Pass one each.")
        most = self.buckets[-1]
        self._inputs = tuple(
            torch.full((most, *t.shape[1:]), pad, dtype=t.dtype, device=device)
            for t, pad in zip(examples, self._pads, strict=True)
        )
        self._real = torch.zeros((), dtype=torch.int32, device=device)
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, Any]] = {}
        self.captures: tuple[Capture, ...] = ()
        if mode == "graph":
            self._capture()

    def bucket(self, tokens: int) -> int:
        """The smallest bucket that holds so many tokens. ValueError: there is none."""
        found = next((size for size in self.buckets if size >= tokens), None)
        if found is None or tokens < 1:
            rule = f"between 1 and the largest bucket, {self.buckets[-1]}"
            fix = "Capture a larger bucket, or run the step itself."
            raise ValueError(check.sentence(_OP, "tokens", rule, tokens, fix))
        return found

    def __call__(self, *tensors: Tensor) -> Any:
        """The step's result for these tokens, without padding: views of memory that the next call overwrites.

        Raises:
            ValueError: more tokens than the largest bucket, none, or tensors of other shapes than the examples.
        """
        tokens = self._check(tensors)
        size = self.bucket(tokens)
        for static, given, pad in zip(self._inputs, tensors, self._pads, strict=True):
            static[:tokens].copy_(given)
            static[tokens:size].fill_(pad)
        self._real.fill_(tokens)
        if self.mode == "graph":
            graph, out = self._graphs[size]
            graph.replay()
        else:
            out = self._run(size)
        return tree_map(lambda value: value[:tokens] if isinstance(value, Tensor) else value, out)

    def __str__(self) -> str:
        """A line for each capture, in the order of capture: what the pool holds, and by how much it grew."""
        lines = [f"{c.tokens:6} tokens: pool {c.pool_bytes} bytes, grew by {c.growth_bytes}" for c in self.captures]
        return "\n".join(lines) or f"{_OP} without graphs, buckets {self.buckets}"

    def _check(self, tensors: tuple[Tensor, ...]) -> int:
        count = len(self._inputs)
        check.value(len(tensors) == count, _OP, "tensors", f"{count} as the examples", len(tensors), "Pass them all.")
        tokens = len(tensors[0]) if tensors[0].dim() else 0
        for index, (static, given) in enumerate(zip(self._inputs, tensors, strict=True)):
            shape, name = (tokens, *static.shape[1:]), f"tensor {index}"
            check.shape(_OP, name, given, shape, "(tokens, ...)", "All have the example's shape behind axis 0.")
            check.dtype(_OP, name, given, (static.dtype,), "It is copied into the captured input.")
        return tokens

    def _run(self, size: int) -> Any:
        with torch.no_grad():
            return self.step(*(static[:size] for static in self._inputs), num_token_non_padded=self._real)

    def _capture(self) -> None:
        pool = torch.cuda.graph_pool_handle()
        captures, before = [], 0
        stream = capture_stream(self._real.device)
        with torch.cuda.device(self._real.device):
            for size in reversed(self.buckets):
                self._real.fill_(size)
                step = partial(self._run, size)
                stream.warm_up(step)
                self._graphs[size] = stream.capture(step, pool)
                held = _pool_bytes(pool)
                captures.append(Capture(size, held, held - before))
                before = held
        self.captures = tuple(captures)


def _pool_bytes(pool: tuple[int, int]) -> int:
    """Bytes that the allocator holds for a graph pool."""
    segments = torch.cuda.memory_snapshot()
    return sum(segment["total_size"] for segment in segments if tuple(segment["segment_pool_id"]) == tuple(pool))
