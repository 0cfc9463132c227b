"""Programmatic dependent launch: a kernel starts while the one before it ends, and waits where it needs its results.

For chains of our own kernels only. The first one of a chain is launched plainly: nothing in it waits for whoever wrote
its inputs. gdc_wait comes before the first load of what another kernel wrote.
"""

import torch
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from moe_ops.arch import capability

__all__ = ["gdc_launch_dependents", "gdc_wait", "given", "pdl"]


def pdl(device: torch.device) -> dict:
    """The constants of a kernel in such a chain on this device: {PDL, launch_pdl}. Hopper and later cards have it."""
    if device.type != "cpu" and capability(device)[0] >= 9:
        return dict(PDL=True, launch_pdl=True)
    return dict(PDL=False)


def given(tensor: torch.Tensor | None) -> tuple:
    """A matrix that may be missing, and its strides."""
    return (None, 0, 0) if tensor is None else (tensor, *tensor.stride())
