"""The grouped GEMMs by the deep_gemm library: the only file that imports it.

A wheel built for another torch imports well and then fails, or kills the process, in its first call. So the first use
on a machine makes one small call in a process of its own, and remembers the outcome beside the versions it holds for.
"""

import importlib.metadata
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import asdict, dataclass
from functools import lru_cache
from types import ModuleType

import torch

from moe_ops import arch, env
from moe_ops.recipes import Recipe, get_recipe
from moe_ops.spec import TensorSpec

_DISTRIBUTIONS = ("sgl-deep-gemm", "deep-gemm", "deep_gemm")
SEEN_TO_WORK = {"2.11": ("0.1.0", "0.1.4.post1"), "2.13": ("0.1.5", "0.2.2")}
"""torch -> the oldest and the newest sgl-deep-gemm that were seen to work with it."""

_WHICH = (
    "Versions that were seen to work together: sgl-deep-gemm "
    + ", ".join(f"{oldest} to {newest} with torch {release}" for release, (oldest, newest) in SEEN_TO_WORK.items())
    + ". Install the one for your torch, or pass backend='triton'."
)
_SMALL_CALL = """
import torch, deep_gemm
scale = torch.rand(4, 3, device="cuda")
aligned = deep_gemm.get_mn_major_tma_aligned_tensor(scale)
torch.cuda.synchronize()
assert torch.equal(aligned, scale) and aligned.stride() == (1, 4)
print("works")
"""
_LONG = {torch.float8_e4m3fn: 640, torch.bfloat16: 2048}  # rows an expert from which labels are the better map
_SECONDS = 120  # the small call compiles a kernel; a hang is an answer too

_stand_in: ContextVar[ModuleType | None] = ContextVar("deep_gemm_stand_in", default=None)


@dataclass(frozen=True)
class Probe:
    """Whether the library can be used here."""

    works: bool
    version: str | None
    reason: str
    """A sentence: what works, or what is wrong and what to do."""


@contextmanager
def use(module: ModuleType) -> Iterator[None]:
    """Within, `module` is called instead of the library: moe_ops.csrc_stubs.deep_gemm in tests without a card."""
    token = _stand_in.set(module)
    try:
        yield
    finally:
        _stand_in.reset(token)


def stand_in() -> ModuleType | None:
    """The module handed to `use`, if any."""
    return _stand_in.get()


@lru_cache(maxsize=1)
def probe() -> Probe:
    """Looks for the library and tries it, in another process, once per machine and set of versions."""
    version = _installed_version()
    if version is None:
        return Probe(False, None, "deep_gemm is not installed. pip install 'fused-moe-ops[cuda]'.")
    if not torch.cuda.is_available():
        return Probe(False, version, "deep_gemm needs a CUDA card, and torch sees none.")
    card = "".join(map(str, arch.capability()))
    name = f"deep_gemm-{version}-torch-{torch.__version__}-sm{card}.json"
    try:
        return Probe(**json.loads((env.cache_dir() / name).read_text()))
    except (OSError, ValueError, TypeError):  # not there yet, or not what this version wrote: try again
        result = try_out(version)
    with suppress(OSError):  # where nothing can be kept, the next process tries again
        (env.cache_dir() / name).write_text(json.dumps(asdict(result)))
    return result


def try_out(version: str) -> Probe:
    """One small call in a process of its own, which it may kill."""
    try:
        done = subprocess.run([sys.executable, "-c", _SMALL_CALL], capture_output=True, text=True, timeout=_SECONDS)
    except subprocess.TimeoutExpired:
        said = f"no answer within {_SECONDS} s"
    else:
        if done.returncode == 0 and done.stdout.strip().endswith("works"):
            return Probe(True, version, f"deep_gemm {version} works with torch {torch.__version__}.")
        lines = done.stderr.strip().splitlines()
        said = lines[-1] if lines else f"the process ended with code {done.returncode}"
    reason = f"deep_gemm {version} fails its first call under torch {torch.__version__}: {said}. {_WHICH}"
    return Probe(False, version, reason)


def library() -> ModuleType:
    """The module to call, or ImportError with the probe's reason."""
    module = stand_in()
    if module is not None:
        return module
    found = probe()
    if not found.works:
        raise ImportError(f"deep_gemm: {found.reason}")
    import deep_gemm

    return deep_gemm


@contextmanager
def dependent_launch(dg: ModuleType) -> Iterator[None]:
    """Within, the library's kernels start while the one before them ends, and wait for its results themselves.

    The setting is the whole process's, so it goes back to what it was, on an error too.
    """
    before = dg.get_pdl()
    dg.set_pdl(True)
    try:
        yield
    finally:
        dg.set_pdl(before)


def grouped_gemm_contiguous(outputs, *, x, x_scale, w, w_scale, m_indices, ends, recipe) -> None:
    """moe::grouped_gemm_contiguous. The library reads one label a block of 128 rows, or where each expert ends."""
    (out,) = outputs
    if out.shape[0] == 0:
        return
    row, dg = get_recipe("grouped_gemm_contiguous", recipe), library()
    x_scale, w_scale = _as_stored(x_scale), _as_stored(w_scale)
    with dependent_launch(dg):
        rows = _rows(m_indices, ends, x, w_scale)
        if row.quantised:
            dg.m_grouped_fp8_fp4_gemm_nt_contiguous((x, x_scale), (w, w_scale), out, **rows, **_granularity(row))
        else:
            dg.m_grouped_bf16_gemm_nt_contiguous(x, w, out, **rows)


def grouped_gemm_masked(outputs, *, x, x_scale, w, w_scale, masked_m, expected_m, recipe) -> None:
    """moe::grouped_gemm_masked. expected_m tunes the library's tiles; it must be positive there."""
    (out,) = outputs
    if out.shape[1] == 0:
        return
    row, dg = get_recipe("grouped_gemm_masked", recipe), library()
    x_scale, w_scale = _as_stored(x_scale), _as_stored(w_scale)
    hint = max(1, expected_m)
    with dependent_launch(dg):
        if row.quantised:
            dg.m_grouped_fp8_fp4_gemm_nt_masked((x, x_scale), (w, w_scale), out, masked_m, hint, **_granularity(row))
        else:
            dg.m_grouped_bf16_gemm_nt_masked(x, w, out, masked_m, hint)


def _rows(m_indices: torch.Tensor, ends: torch.Tensor | None, x: torch.Tensor, w_scale: torch.Tensor | None) -> dict:
    """Which rows are whose. Walked by ends, the library leaves out the blocks behind the last expert, of which a worst
    case has many; by labels it loads them in vain but is quicker about long experts. On one H200 (0.1.4.post1,
    2026-12-01), both GEMMs of E=32 K=7168 I=2048: T=512 467 against 617 us, T=4096 the same; of E=128 K=2048 I=768:
    T=4096 386 against 410, T=16384 1236 against 1117 us. In bf16, GEMM1 of the first: T=512 549 against 751, T=16384
    12441 against 11457.
    Not measured on cards that read packed scales.
    """
    packed = w_scale is not None and w_scale.dtype == torch.int32
    if ends is None or packed or len(x) > _LONG[x.dtype] * len(ends):
        return dict(grouped_layout=m_indices)
    return dict(grouped_layout=ends, use_psum_layout=True)


def _as_stored(scale: torch.Tensor | None) -> torch.Tensor | None:
    """A packed scale of width 1 with the stride that the library checks; a copy by way of a file resets it."""
    if scale is None or scale.dtype != torch.int32 or scale.shape[-1] != 1:
        return scale
    return TensorSpec.mn_major(*scale.shape, dtype=scale.dtype).restride(scale)


def _granularity(recipe: Recipe) -> dict:
    """What the library must be told of the scales. It knows the block recipe by the dtype of the weight's scale."""
    if recipe.w_block[0] > 1:
        return {}
    return {"recipe_a": (1, recipe.x_group), "recipe_b": (1, recipe.w_block[1])}


def _installed_version() -> str | None:
    for name in _DISTRIBUTIONS:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None
