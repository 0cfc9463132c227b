"""Which backend runs an op: an explicit one, or `auto` by a fixed rule. Never a silent fallback."""

import importlib
from collections.abc import Callable, Mapping
from functools import lru_cache

import torch

from moe_ops import arch, check, env
from moe_ops.arch import BACKENDS
from moe_ops.kernels import deep_gemm, deep_gemm_dense
from moe_ops.recipes import DENSE, FORMAT_OF_SCALE
from moe_ops.rows import BLOCK, FUSED, ceil_div, contiguous_rows
from moe_ops.sizes import Layer

FEW_ROWS = 8
"""Mean rows an expert up to which `auto` takes the Triton GEMMs. On one H200 (torch 2.11, triton 3.6,
2026-12-01) they are the faster ones up to 4 rows (fp8 layer, E=128 K=2048 I=768, T=64: 175 against
205 us), deep_gemm's from 16 (E=32 K=7168 I=2048, T=64: 391 against 537 us)."""

AUTO_RULE = (
    f"auto: reference on a CPU; on a CUDA card deep_gemm for the GEMMs that it reads there from {FEW_ROWS + 1} rows an "
    "expert on, triton for the rest"
)

_NO_SUCH_GEMM = "deep_gemm has no kernels for the gathered and direct layouts."

Kernels = Mapping[str, Callable]
"""Backend name -> kernel(outputs, **arguments), which writes the outputs in place."""


def pick(op: str, backend: str, device: torch.device, kernels: Kernels, arguments: Mapping) -> Callable:
    """The kernel of `backend` for this device and these arguments, or an error that says what would run instead.

    deep_gemm has GEMMs alone; under its name, the stages around them run as auto would run them.
    """
    check.one_of(op, "backend", backend, BACKENDS)
    if backend == "auto":
        backend = env.backend() or "auto"
        check.one_of(op, "MOE_OPS_BACKEND", backend, BACKENDS, "Unset it, or choose one of them.")
    if backend == "auto" or (backend == "deep_gemm" and "gemm" not in op):
        if device.type == "cpu":
            backend = "reference"
        else:
            many = "deep_gemm" in kernels and not _few_rows(op, arguments)
            backend = "deep_gemm" if many and why_not_deep_gemm(op, device, arguments) is None else "triton"
    if backend == "triton":
        _check_triton(op, device)
    elif backend == "deep_gemm":
        reason = why_not_deep_gemm(op, device, arguments) if "deep_gemm" in kernels else _NO_SUCH_GEMM
        fix = "Pass backend='auto' for what runs here."
        torch._check_not_implemented(
            reason is None,
            lambda: check.sentence(op, "backend", "one that runs here", "'deep_gemm'", f"{reason} {fix}"),
        )
    return kernels[backend]


def why_not_deep_gemm(op: str, device: torch.device, arguments: Mapping) -> str | None:
    """A sentence that says why deep_gemm cannot run this GEMM on this device, or None if it can."""
    recipe, scale_format = _form(op, arguments)
    if op not in DENSE:
        layout = "contiguous" if op.endswith("contiguous") else "masked"
        return why_not_grouped(device, recipe, scale_format, layout, (arguments["w"].shape[2],))
    if deep_gemm.stand_in() is not None:
        return None
    reason = _why_not_here(device, recipe, scale_format)
    if reason is not None:
        return reason
    return deep_gemm_dense.why_not(op, arch.arch_of(op, device), arguments) or _why_not_installed(device)


def why_not_grouped(
    device: torch.device | str, recipe: str, scale_format: str, layout: str, depths: tuple[int, ...]
) -> str | None:
    """why_not_deep_gemm of grouped GEMMs in this layout over these K. A name in arch.ARCHS: as if it were installed."""
    if deep_gemm.stand_in() is not None:  # it makes the library's checks itself
        return None
    reason = _why_not_here(device, recipe, scale_format)
    if reason is not None:
        return reason
    if layout != "contiguous" and arch.arch_of("deep_gemm", device) == "sm120":
        return "deep_gemm is used on sm120 in the contiguous layout only, as SGLang does."
    odd = next((K for K in depths if K % 64), None) if scale_format == "none" else None
    if odd is not None:
        return f"deep_gemm's bf16 GEMM needs K to be a multiple of 64, and K is {odd}."
    return _why_not_installed(device)


def of_layer(layer: Layer, device: torch.device) -> str:
    """What pick() gives the GEMMs of a whole call in the layer's own layout where nothing but `auto` is asked for."""
    if device.type == "cpu":
        return "reference"
    if layer.layout == "contiguous":
        few = contiguous_rows(layer.whole, layer.top_k, layer.E) < BLOCK * layer.E
    else:
        few = ceil_div(layer.whole * layer.top_k, layer.experts) <= FEW_ROWS
    form = (device, layer.recipe, layer.scale_format, layer.layout, (layer.K, layer.I))
    return "triton" if layer.layout in FUSED or few or why_not_grouped(*form) is not None else "deep_gemm"


def has_stand_in() -> bool:
    """Whether calls go to a stand-in of deep_gemm instead of the library."""
    return deep_gemm.stand_in() is not None


def _why_not_here(device: torch.device | str, recipe: str, scale_format: str) -> str | None:
    name = arch.arch_of("deep_gemm", device)
    if name == "cpu":
        return f"deep_gemm needs a CUDA card, and the tensors are on {device}."
    if not arch.runs(recipe, scale_format, device, "deep_gemm"):
        return f"deep_gemm does not read {recipe} with {scale_format} scales on {name}."
    return None


def _why_not_installed(device: torch.device | str) -> str | None:
    if isinstance(device, str):
        return None
    found = deep_gemm.probe()
    return None if found.works else found.reason


def lazy(path: str) -> Callable:
    """The kernel at "module:function", imported at its first call: moe_ops imports without the kernel's package."""
    module, _, name = path.partition(":")

    def kernel(outputs, **arguments) -> None:
        function = getattr(importlib.import_module(module), name)
        with torch.cuda.device_of(outputs[0]):  # kernels launch on the current device
            function(outputs, **arguments)

    return kernel


_REFERENCE = (
    "backend='reference' is plain torch: right on any device, but slow and with host syncs, so it cannot be captured "
    "in a CUDA graph."
)


def _few_rows(op: str, arguments: Mapping) -> bool:
    """Whether an expert has few rows on average. Contiguous: fewer blocks than experts, so many have none.

    A dense GEMM has one expert for all rows.
    """
    if op in DENSE:
        return arguments["x"].shape[0] <= FEW_ROWS
    if "expected_m" in arguments:
        return arguments["expected_m"] <= FEW_ROWS
    return arguments["x"].shape[0] < BLOCK * arguments["w"].shape[0]


def _form(op: str, arguments: Mapping) -> tuple[str, str]:
    """(recipe, scale format) of a GEMM's weights."""
    scale = arguments.get("w_scale")
    return DENSE.get(op) or arguments["recipe"], "none" if scale is None else FORMAT_OF_SCALE[scale.dtype]


def _check_triton(op: str, device: torch.device) -> None:
    """Raises in words where the Triton kernels cannot run."""
    missing = _missing_triton()
    if missing:
        raise ImportError(
            f"{op}: backend 'triton' must find an importable triton; got {missing}. "
            f"pip install 'fused-moe-ops[triton]'. {_REFERENCE}"
        )
    torch._check_not_implemented(
        device.type == "cuda" or (device.type == "cpu" and _interpreted()),
        lambda: (
            f"{op}: backend 'triton' must have its tensors on a CUDA device; got {device.type}. Pass backend='auto' or "
            f"'reference' there, or start Python with TRITON_INTERPRET=1 to run the kernels in Triton's interpreter."
        ),
    )


@lru_cache(maxsize=1)
def _missing_triton() -> str | None:
    """Why triton cannot be imported, if it cannot."""
    try:
        importlib.import_module("triton")
    except Exception as error:  # a broken installation may raise anything
        return f"{type(error).__name__}: {error}"
    return None


def _interpreted() -> bool:
    from triton import knobs

    return knobs.runtime.interpret
