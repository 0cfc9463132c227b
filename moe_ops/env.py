"""The environment variables of the package, with their meaning: the only place that reads them."""

import os
from pathlib import Path


def backend() -> str | None:
    """MOE_OPS_BACKEND: what `backend="auto"` means instead of its rule; for finding out which backend is at fault."""
    return os.environ.get("MOE_OPS_BACKEND") or None


def cache_dir() -> Path:
    """MOE_OPS_CACHE_DIR: where results of slow probes are kept; else moe_ops under XDG_CACHE_HOME or ~/.cache.

    Private to the user: what lies there decides which code runs.
    """
    chosen = os.environ.get("MOE_OPS_CACHE_DIR")
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    path = Path(chosen) if chosen else base / "moe_ops"
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    return path


def tracing() -> bool:
    """MOE_OPS_TRACING: 1 puts ranges around every op and stage (moe_ops.tracing)."""
    return os.environ.get("MOE_OPS_TRACING", "0") not in ("", "0")


def compile_caches() -> dict[str, Path]:
    """TRITON_CACHE_DIR and DG_JIT_CACHE_DIR, or where Triton and deep_gemm keep compiled kernels without them."""
    home = Path.home()
    defaults = dict(TRITON_CACHE_DIR=home / ".triton" / "cache", DG_JIT_CACHE_DIR=home / ".deep_gemm")
    return {name: Path(os.environ.get(name) or path) for name, path in defaults.items()}


def switch_off_multicast() -> None:
    """Sets TORCH_SYMM_MEM_DISABLE_MULTICAST: torch's symmetric memory then leaves NVLink multicast alone. One process
    on one card gains nothing from it."""
    os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"


SWITCHES = (
    "MOE_OPS_BACKEND",
    "MOE_OPS_CACHE_DIR",
    "MOE_OPS_TRACING",
    "XDG_CACHE_HOME",
    "CUDA_VISIBLE_DEVICES",
    "TRITON_INTERPRET",
    "TRITON_CACHE_DIR",
    "TORCHINDUCTOR_CACHE_DIR",
    "DG_JIT_CACHE_DIR",
)
"""The package's own, and those of torch, Triton and deep_gemm that decide what runs, or where compiled code is kept."""


def switches() -> dict[str, str]:
    """Those of SWITCHES that are set."""
    return {name: os.environ[name] for name in SWITCHES if name in os.environ}
