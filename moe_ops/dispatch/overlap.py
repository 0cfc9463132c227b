"""Overlap: the experts of one part of the tokens beside the journeys of the others.

GEMM2 writes every row that combine sends, so nothing of one call's combine can start before GEMM2 ends, short of
signals from inside the kernel. What can: combine of the tokens before, while GEMM1 and GEMM2 of these run, and dispatch
of the tokens behind. Two streams, one event after each GEMM2. On a CPU the same calls are made in the same order. The
result has the bits of the parts one by one; those of one piece, as far as a GEMM's rows do not depend on how many there
are beside them (docs/decode.md).

Not run on cards yet.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from moe_ops import check
from moe_ops.dispatch.base import Dispatcher
from moe_ops.dispatch.experts import Experts
from moe_ops.kernels import deep_gemm
from moe_ops.rows import ceil_div

_OP = "Overlap"


@dataclass(frozen=True)
class Overlap:
    """How a call is split, and what the transport may use of the card while it computes.

    Every part reads the touched experts' weights again, so it pays where the exchange is the longer half: large batches
    over slow links, not decode of a few tokens.
    """

    parts: int = 2
    """Runs of tokens, as equal as can be; the dispatcher's max_tokens is of one of them."""
    communication_sms: int | None = None
    """Multiprocessors for the transport's kernels: deep_gemm's GEMMs leave them alone meanwhile, a `buffer` is told so.
    None: both as they are. Triton's GEMMs and NCCL's kernels know no such number."""
    buffer: Any = None
    """deep_ep.Buffer or nixl_ep.Buffer: what set_num_sms is called on, for the normal kernels."""
    _streams: dict[torch.device, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        fix = "One part has nothing beside it."
        check.value(self.parts >= 2, _OP, "parts", "at least 2", self.parts, fix)
        sms, fix = self.communication_sms, "The normal kernels send with one half and receive with the other."
        check.value(sms is None or (sms > 0 and sms % 2 == 0), _OP, "communication_sms", "positive and even", sms, fix)

    def capacity(self, max_tokens: int | None) -> int | None:
        """max_tokens of a part, for a rank that brings max_tokens in all."""
        return None if max_tokens is None else ceil_div(max_tokens, self.parts)

    def stream(self, device: torch.device) -> Any:
        """The transport's own stream; None on a CPU."""
        if device.type != "cuda":
            return None
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        return self._streams[device]


def run_in_parts(dispatcher: Dispatcher, experts: Experts, stages: Any, overlap: Overlap, *batch: Tensor) -> Tensor:
    """dispatch.run on each part, overlapped. stages: (dispatcher, experts, state) -> what combine takes."""
    if torch.compiler.is_compiling():
        raise RuntimeError(
            f"{_OP}: overlap must be None in a compiled graph; got {overlap}. The compiler orders what it "
            "traces: capture the eager layer in a CUDA graph instead."
        )
    T, device = batch[0].shape[0], batch[0].device
    each = ceil_div(T, overlap.parts)
    parts = [tuple(t[i * each : (i + 1) * each] for t in batch) for i in range(overlap.parts)]
    main: Any = torch.cuda.current_stream(device) if device.type == "cuda" else None
    side = overlap.stream(device)
    # Kept until the streams have met again: each stream's allocator knows nothing of the other's reads.
    states, sums, outs = [], [], []

    def send(part: int) -> None:
        with _on(side):
            states.append((dispatcher.dispatch(*parts[part]), _event(side)))

    with shared_sms(overlap):
        if side is not None:
            side.wait_stream(main)
        send(0)
        for part in range(overlap.parts):
            state, arrived = states[part]
            if main is not None:
                main.wait_event(arrived)
            sums.append(stages(dispatcher, experts, state))
            computed = _event(main)
            if part + 1 < overlap.parts:  # behind the GEMMs' launch: it may wait for counts on the host
                send(part + 1)
            with _on(side):
                if side is not None:
                    side.wait_event(computed)
                outs.append(dispatcher.combine(sums[part], state))
        if main is not None:
            main.wait_stream(side)
    return torch.cat(outs)


@contextmanager
def shared_sms(overlap: Overlap) -> Iterator[None]:
    """Within, the transport's kernels have communication_sms and deep_gemm's the rest; back as it was, on an error too.

    Raises:
        ValueError: nothing would be left for the GEMMs.
    """
    sms = overlap.communication_sms
    with ExitStack() as undo:
        if sms is not None and overlap.buffer is not None:
            kind = overlap.buffer
            undo.callback(kind.set_num_sms, kind.num_sms)
            kind.set_num_sms(sms)
        if sms is not None and _deep_gemm_runs():
            library = deep_gemm.library()
            every = library.get_num_sms()
            check.value(
                sms < every, _OP, "communication_sms", f"fewer than the card's {every}", sms, "GEMMs need some."
            )
            undo.callback(library.set_num_sms, every)
            library.set_num_sms(every - sms)
        yield


def _deep_gemm_runs() -> bool:
    return deep_gemm.stand_in() is not None or (torch.cuda.is_available() and deep_gemm.probe().works)


def _on(stream: Any) -> Any:
    return torch.cuda.stream(stream)  # a no-op for None


def _event(stream: Any) -> Any:
    return None if stream is None else stream.record_event()
