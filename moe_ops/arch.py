"""What a device asks of the data: the only place that looks at a compute capability."""

import torch

from moe_ops.recipes import Recipe


def default_scale_format(recipe: Recipe, device: torch.device) -> str:
    """The scale format to prepare weights in for this device.

    Blackwell's tensor cores scale by powers of two (UE8M0); Hopper's deep_gemm kernels and the CPU take fp32.
    A recipe with a single format has no choice.
    """
    if device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 10:
        return recipe.scale_formats[-1]
    return recipe.scale_formats[0]
