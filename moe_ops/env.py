"""The environment variables of the package, with their meaning: the only place that reads them."""

import os
from pathlib import Path


def backend() -> str | None:
    """MOE_OPS_BACKEND: what `backend="auto"` means instead of its rule; for finding out which backend is at fault."""
    return os.environ.get("MOE_OPS_BACKEND")


def cache_dir() -> Path:
    """MOE_OPS_CACHE_DIR: where results of slow probes are kept; else moe_ops under XDG_CACHE_HOME or ~/.cache.

    Private to the user: what lies there decides which code runs.
    """
    chosen = os.environ.get("MOE_OPS_CACHE_DIR")
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    path = Path(chosen) if chosen else base / "moe_ops"
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    return path
