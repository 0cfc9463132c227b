"""CUDA graph captures: what must be there before one, and the stream that warm-ups and captures share."""

import ctypes
import threading
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch

_ONE_AT_A_TIME = threading.RLock()
"""Held by warm-ups and captures: what another thread launched onto their stream meanwhile would be captured."""


def capturing() -> bool:
    """Whether the current stream is inside a capture."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def prepare(device: torch.device) -> None:
    """Makes cuBLAS's handle of this thread for a card: of what a forward needs, the one thing that no capture can make.
    With it torch takes the scratch memory of the current stream (see CaptureStream), as the first product would.
    Nothing happens on other devices, nor inside a capture."""
    if device.type == "cuda" and torch.cuda.is_initialized():
        with torch.cuda.device(device):
            if not capturing():
                torch.cuda.current_blas_handle()


def refuse_compilation(op: str, device: torch.device) -> None:
    """RuntimeError where a graph for this device is traced inside a capture: what torch.compile does next, it copies,
    measures and synchronises, a capture does not allow, and torch says of it only that."""
    if device.type == "cuda" and capturing():
        raise RuntimeError(
            f"{op}: torch.compile must be over before a CUDA graph capture begins; got a call that is compiled inside "
            "one. Run the compiled model once for each captured size first, after moe_ops.warmup."
        )


class CaptureStream:
    """One stream for all warm-ups and captures on a card.

    torch gives cuBLAS scratch memory for each stream (32 MiB on Hopper) and keeps it. Warmed up on the stream that
    captures, it is there before a capture begins: no graph's pool holds it, and all graphs that a thread captures on
    the card share it. So they are replayed one after another, whatever their pools.

    It lies in a memory pool of its own, which lives as long as the process. Whoever captures in a private pool, as
    mode="reduce-overhead" does, has torch forget such memory; graphs that know its address go on writing there.
    """

    def __init__(self, device: torch.device):
        self.device = device
        with torch.cuda.device(device):
            self.stream = torch.cuda.Stream()
            self._scratch = torch.cuda.MemPool()
        # One reference that nobody gives back, not even the interpreter at its end: where a capture has failed, torch
        # 2.11 counts it as under way for good, and its destructor of a pool then ends the process.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._scratch))

    def warm_up(self, run: Callable[[], object], times: int = 2) -> None:
        """Calls it on the stream, between what the current stream was given before and after. The first call compiles,
        and looks for libraries."""
        with _ONE_AT_A_TIME:
            around = torch.cuda.current_stream(self.device)
            self.stream.wait_stream(around)
            with torch.cuda.stream(self.stream):
                with torch.cuda.use_mem_pool(self._scratch):
                    torch.cuda.current_blas_handle()  # which takes the scratch memory
                for _ in range(times):
                    run()
            around.wait_stream(self.stream)

    def capture(self, run: Callable[[], Any], pool: Any = None) -> tuple[torch.cuda.CUDAGraph, Any]:
        """(graph, what the call returned: every replay writes it anew). Warm up first.

        pool: of torch.cuda.graph_pool_handle(), for graphs whose results are not needed at the same time. None: one of
        its own.
        """
        graph = torch.cuda.CUDAGraph()
        # torch.cuda.graph leaves its stream current when the capture fails; the outer context does not.
        with _ONE_AT_A_TIME, torch.cuda.stream(self.stream), torch.cuda.graph(graph, pool=pool, stream=self.stream):
            result = run()
        return graph, result


def capture_stream(device: torch.device) -> CaptureStream:
    """The card's stream for captures: the same one in every call."""
    with _ONE_AT_A_TIME:  # a cache alone would let two threads make two
        return _of_card(torch.cuda.current_device() if device.index is None else device.index)


@lru_cache
def _of_card(index: int) -> CaptureStream:
    return CaptureStream(torch.device("cuda", index))
