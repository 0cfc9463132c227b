"""What a device asks of the data: the only place that looks at a compute capability."""

from functools import lru_cache

import torch

from moe_ops import check
from moe_ops.recipes import RECIPES, Recipe

ARCHS = ("cpu", "sm90", "sm100", "sm120")
"""cpu; Hopper and older cards; data-centre Blackwell; the Blackwell of workstations."""


def capability(device: torch.device | None = None) -> tuple[int, int]:
    """Compute capability (major, minor) of a CUDA device; None: the current one."""
    return torch.cuda.get_device_capability(device)


def here() -> torch.device:
    """The current CUDA device where torch sees one, the CPU elsewhere: where a command runs that was told nothing."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@lru_cache
def multiprocessors(device: torch.device) -> int:
    """How many a CUDA device has."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def arch_of(op: str, device: torch.device | str) -> str:
    """The name in ARCHS of a device; such a name is returned as it is, so that one machine can prepare for another."""
    if isinstance(device, str) and (device in ARCHS or device.startswith("sm")):
        check.one_of(op, "arch", device, ARCHS)
        return device
    device = torch.device(device)
    if device.type != "cuda":
        return "cpu"
    major = capability(device)[0]
    return "sm90" if major < 10 else "sm100" if major < 12 else "sm120"


def default_scale_format(recipe: Recipe, device: torch.device | str) -> str:
    """The scale format to prepare weights in for this device, or this name in ARCHS.

    Blackwell's tensor cores scale by powers of two (UE8M0); Hopper's deep_gemm kernels and the CPU take fp32.
    A recipe with a single format has no choice.
    """
    blackwell = arch_of("default_scale_format", device) in ("sm100", "sm120")
    return recipe.scale_formats[-1 if blackwell else 0]


_EVERYTHING = {recipe.name: recipe.scale_formats for recipe in RECIPES.values()}
_HOPPER = {"bf16": ("none",), "fp8_block": ("fp32",)}
_BLACKWELL = {"bf16": ("none",), "fp8_block": ("ue8m0",), "mxfp8": ("ue8m0",), "mxfp4": ("ue8m0",)}

READS: dict[str, dict[str, dict[str, tuple[str, ...]]]] = {
    "reference": dict.fromkeys(ARCHS, _EVERYTHING),
    "triton": dict.fromkeys(("sm90", "sm100", "sm120"), _EVERYTHING),
    "deep_gemm": {"sm90": _HOPPER, "sm100": _BLACKWELL, "sm120": _BLACKWELL},
}
"""backend -> arch -> recipe -> scale formats that its GEMMs read."""

BACKENDS = ("auto", *READS)
"""What an argument `backend` may be."""


def runs(recipe: str, scale_format: str, device: torch.device | str, backend: str = "auto") -> bool:
    """Whether a backend (auto: any of them) reads weights in this form on a device, or on a name in arch.ARCHS."""
    check.one_of("runs", "backend", backend, BACKENDS)
    arch = arch_of("runs", device)
    tables = READS.values() if backend == "auto" else (READS[backend],)
    return any(scale_format in table.get(arch, {}).get(recipe, ()) for table in tables)
