"""Named ranges around every op and stage, for torch.profiler and Nsight Systems.

They are opened inside the ops' kernels, so a traced graph does not hold them and compiles whole. A CUDA graph holds
the ranges of its capture only: a replay runs no Python.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar

import torch

from moe_ops import env

_enabled: ContextVar[bool | None] = ContextVar("moe_ops_tracing", default=None)
_NOTHING = nullcontext()


@contextmanager
def tracing(enabled: bool = True) -> Iterator[None]:
    """Within, each op and stage is a range `moe_ops.<name>`: record_function, and NVTX for tensors on a CUDA card.

    Without it MOE_OPS_TRACING=1 does the same for the whole process.

    Args:
        enabled: False switches off, within, what is on around it.
    """
    token = _enabled.set(enabled)
    try:
        yield
    finally:
        _enabled.reset(token)


def span(name: str, device: torch.device):
    """The range of one op: a context, which does nothing unless tracing is on."""
    enabled = _enabled.get()
    if not (env.tracing() if enabled is None else enabled):
        return _NOTHING
    return _range(f"moe_ops.{name}", device.type == "cuda")


@contextmanager
def _range(name: str, nvtx: bool) -> Iterator[None]:
    with torch.profiler.record_function(name):
        if nvtx:
            torch.cuda.nvtx.range_push(name)
        try:
            yield
        finally:
            if nvtx:
                torch.cuda.nvtx.range_pop()
