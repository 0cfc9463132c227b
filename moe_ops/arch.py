"""What a device asks of the data: the only place that looks at a compute capability."""

import torch

from moe_ops import check
from moe_ops.recipes import Recipe

ARCHS = ("cpu", "sm90", "sm100", "sm120")
"""cpu; Hopper and older cards; data-centre Blackwell; the Blackwell of workstations."""


def arch_of(op: str, device: torch.device | str) -> str:
    """The name in ARCHS of a device; such a name is returned as it is, so that one machine can prepare for another."""
    if isinstance(device, str) and (device in ARCHS or device.startswith("sm")):
        check.one_of(op, "arch", device, ARCHS)
        return device
    device = torch.device(device)
    if device.type != "cuda":
        return "cpu"
    major = torch.cuda.get_device_capability(device)[0]
    return "sm90" if major < 10 else "sm100" if major < 12 else "sm120"


def default_scale_format(recipe: Recipe, device: torch.device | str) -> str:
    """The scale format to prepare weights in for this device, or this name in ARCHS.

    Blackwell's tensor cores scale by powers of two (UE8M0); Hopper's deep_gemm kernels and the CPU take fp32.
    A recipe with a single format has no choice.
    """
    blackwell = arch_of("default_scale_format", device) in ("sm100", "sm120")
    return recipe.scale_formats[-1 if blackwell else 0]
