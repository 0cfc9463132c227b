"""Which backend runs an op: an explicit one, or `auto` by a fixed order. Never a silent fallback."""

from collections.abc import Callable, Mapping

import torch

from moe_ops import check

BACKENDS = ("auto", "reference")

Kernels = Mapping[str, Callable]
"""Backend name -> kernel(outputs, **arguments), which writes the outputs in place."""


def pick(op: str, backend: str, device: torch.device, kernels: Kernels) -> Callable:
    """The kernel of `backend` for this device, or an error that says what would run instead."""
    check.one_of(op, "backend", backend, BACKENDS)
    if backend == "auto":
        if device.type == "cpu":
            return kernels["reference"]
        torch._check_not_implemented(
            False,
            lambda: (
                f"{op}: no {device.type} kernel is written yet. Pass backend='reference': plain torch, right on any "
                "device, but slow and with host syncs, so it cannot be captured in a CUDA graph."
            ),
        )
    return kernels[backend]
