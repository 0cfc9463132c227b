"""How kernels are declared and launched.

Programmatic dependent launch, for chains of our own kernels only: a kernel starts while the one before it ends, and
waits where it needs its results. The first one of a chain is launched plainly: nothing in it waits for whoever wrote
its inputs. gdc_wait comes before the first load of what another kernel wrote.
"""

from collections.abc import Callable
from typing import TypeVar

import torch
import triton
from triton import knobs
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from moe_ops.arch import capability

__all__ = ["gdc_launch_dependents", "gdc_wait", "given", "jit", "keyed", "pdl"]

_Compiled = TypeVar("_Compiled")


def keyed(compiled: _Compiled) -> _Compiled:
    """Has Triton hash a function now, when those that it calls have been hashed and no other has.

    Left until its first launch, the hash has the constants of callees that another kernel happened to need before, and
    not those of the others: the same kernel would have one name in Triton's cache after a warm-up, and another in the
    process that relies on it.
    """
    if not knobs.runtime.interpret:  # which has no cache
        getattr(compiled, "cache_key")  # noqa: B009  a property, computed when it is first read
    return compiled


def jit(function: Callable) -> triton.JITFunction:
    """triton.jit, keyed."""
    return keyed(triton.jit(function))


def pdl(device: torch.device) -> dict:
    """The constants of a kernel in such a chain on this device: {PDL, launch_pdl}. Hopper and later cards have it."""
    if device.type != "cpu" and capability(device)[0] >= 9:
        return dict(PDL=True, launch_pdl=True)
    return dict(PDL=False)


def given(tensor: torch.Tensor | None) -> tuple:
    """A matrix that may be missing, and its strides."""
    return (None, 0, 0) if tensor is None else (tensor, *tensor.stride())
