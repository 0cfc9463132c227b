"""doctor: what is installed here, which backend runs which recipe in which layout, what is wrong and what mends it."""

import importlib
import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
from dataclasses import asdict, dataclass
from typing import Any

import torch

import moe_ops
from moe_ops import arch, backends, env
from moe_ops.choice import ANY, candidates, layouts
from moe_ops.kernels.deep_gemm import SEEN_TO_WORK
from moe_ops.recipes import RECIPES
from moe_ops.rows import FUSED, LAYOUTS
from moe_ops.sizes import Layer

_PACKAGES = ("torch", "triton", "sgl-deep-gemm", "transformers", "safetensors", "matplotlib")
_SIZES: dict[str, Any] = dict(T=1, top_k=8, E=128, K=2048, I=768)
"""K and I that every layout holds."""


@dataclass(frozen=True)
class Route:
    """One recipe in one layout."""

    recipe: str
    scale_format: str
    layout: str
    backend: str | None
    """Of the GEMMs here, from backends.FEW_ROWS + 1 rows an expert on. None: the layout has no kernels."""
    expected: str | None
    """The same where everything is installed."""
    why: str


@dataclass(frozen=True)
class Problem:
    """Something that keeps a recipe from the backend that this arch should have."""

    what: str
    command: str
    """For the shell."""


@dataclass(frozen=True)
class Report:
    """Everything that doctor says."""

    versions: dict[str, str]
    arch: str
    cards: list[str]
    routes: list[Route]
    auto: dict[str, str]
    """recipe -> the layouts that `auto` takes, by mean rows an expert."""
    switches: dict[str, str]
    caches: dict[str, str]
    problems: list[Problem]

    def asdict(self) -> dict:
        return {**asdict(self), "healthy": not self.problems}


def examine() -> Report:
    """Looks at this machine. The first look on a card with deep_gemm makes one small call of it: up to two minutes."""
    device = arch.here()
    name = arch.arch_of("doctor", device)
    forms = [(recipe, arch.default_scale_format(row, device)) for recipe, row in RECIPES.items()]
    routes = [_route(*form, layout, device, name) for form in forms for layout in LAYOUTS[1:]]
    caches, problems = _caches()
    problems = [*_card_problems(device), *_backend_problems(routes, device), *problems]
    auto = {form[0]: _auto(*form, device) for form in forms}
    return Report(_versions(device), name, _cards(device), routes, auto, env.switches(), caches, problems)


def _route(recipe: str, scale_format: str, layout: str, device: torch.device, name: str) -> Route:
    layer = Layer(**_SIZES, recipe=recipe, scale_format=scale_format)
    if layout not in layouts(layer):
        return Route(recipe, scale_format, layout, None, None, "no kernels for this recipe")
    expected, _ = _gemm_backend(layer, layout, name, name)
    backend, why = _gemm_backend(layer, layout, device, name)
    forced = env.backend()
    if forced not in (None, "auto"):
        backend, why = forced, f"MOE_OPS_BACKEND={forced}"
    return Route(recipe, scale_format, layout, backend, expected, why)


def _gemm_backend(layer: Layer, layout: str, device: torch.device | str, name: str) -> tuple[str, str]:
    if name == "cpu":
        return "reference", "there is no card, so plain torch runs"
    if layout in FUSED:
        return "triton", "this package's kernels alone have this layout"
    reason = backends.why_not_grouped(device, layer.recipe, layer.scale_format, layout, (layer.K, layer.I))
    few = f"triton up to {backends.FEW_ROWS} rows an expert"
    return ("deep_gemm", few) if reason is None else ("triton", reason)


def _auto(recipe: str, scale_format: str, device: torch.device) -> str:
    """The rows of the table that can run here, up to the first without a bound."""
    layer, parts = Layer(**_SIZES, recipe=recipe, scale_format=scale_format), []
    forced = env.backend() or "auto"
    if forced not in backends.BACKENDS:
        return "nothing"
    for choice, reason in candidates(layer, forced, device):
        if reason is None:
            parts.append(str(choice))
            if choice.rows == ANY:
                break
    return "; then ".join(parts) or "nothing"


def _card_problems(device: torch.device) -> list[Problem]:
    smi = _nvidia_smi("-L")
    if device.type == "cuda" or not smi:
        return []
    if torch.version.cuda is None:
        what = f"This machine has a card ({smi[0]}), and this torch ({torch.__version__}) is built without CUDA."
        return [Problem(what, f"{sys.executable} -m pip install --force-reinstall torch")]
    driver = (_nvidia_smi("--query-gpu=driver_version", "--format=csv,noheader") or ["unknown"])[0]
    what = (
        f"This machine has a card ({smi[0]}), and torch for CUDA {torch.version.cuda} cannot use it with driver "
        f"{driver}, or with CUDA_VISIBLE_DEVICES as it is."
    )
    return [Problem(what, f"unset CUDA_VISIBLE_DEVICES; {sys.executable} -c 'import torch; torch.cuda.init()'")]


def _backend_problems(routes: list[Route], device: torch.device) -> list[Problem]:
    problems, forced = [], env.backend()
    wrong = [route for route in routes if route.backend != route.expected]
    if forced is not None and forced not in backends.BACKENDS:
        what = f"MOE_OPS_BACKEND={forced} is none of {', '.join(backends.BACKENDS)}."
        return [Problem(what, "unset MOE_OPS_BACKEND")]
    if forced not in (None, "auto") and wrong:
        names = ", ".join(sorted({str(route.expected) for route in wrong}))
        problems.append(Problem(f"MOE_OPS_BACKEND={forced} is used where {names} should be.", "unset MOE_OPS_BACKEND"))
    elif any(route.expected == "deep_gemm" for route in wrong):
        why = next(route.why for route in wrong if route.expected == "deep_gemm")
        problems.append(Problem(why, _deep_gemm_command(installed=_version("sgl-deep-gemm") is not None)))
    if device.type == "cuda" and (missing := _missing("triton")):
        what = f"triton cannot be imported ({missing}), and every stage on a card needs it."
        problems.append(Problem(what, "pip install 'fused-moe-ops[triton]'"))
    return problems


def _deep_gemm_command(installed: bool) -> str:
    fitting = SEEN_TO_WORK.get(".".join(torch.__version__.split(".")[:2]))
    if fitting is not None:
        return f"pip install 'sgl-deep-gemm>={fitting[0]},<={fitting[1]}'"
    return "export MOE_OPS_BACKEND=triton" if installed else "pip install 'fused-moe-ops[cuda]'"


def _caches() -> tuple[dict[str, str], list[Problem]]:
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    caches = {"inductor": env.switches().get("TORCHINDUCTOR_CACHE_DIR") or default_cache_dir()}
    if not _missing("triton"):
        from triton import knobs

        caches["triton"] = str(knobs.cache.dir)
    try:
        folder = env.cache_dir()
    except OSError as error:
        return caches, [Problem(f"The cache folder cannot be made: {error}.", "export MOE_OPS_CACHE_DIR=/tmp/moe_ops")]
    if not os.access(folder, os.W_OK):
        return caches, [Problem(f"{folder} cannot be written.", "export MOE_OPS_CACHE_DIR=/tmp/moe_ops")]
    return {"moe_ops": str(folder), **caches}, []


def _versions(device: torch.device) -> dict[str, str]:
    found = {"moe_ops": moe_ops.__version__, "python": platform.python_version()}
    found |= {name: _version(name) or "not installed" for name in _PACKAGES}
    found["CUDA of torch"] = torch.version.cuda or "none"
    if device.type == "cuda":
        driver = _nvidia_smi("--query-gpu=driver_version", "--format=csv,noheader")
        found["driver"] = driver[0] if driver else "unknown"
    return found


def _cards(device: torch.device) -> list[str]:
    if device.type == "cpu":
        return []
    cards = []
    for index in range(torch.cuda.device_count()):
        major, minor = arch.capability(torch.device("cuda", index))
        cards.append(f"{torch.cuda.get_device_name(index)} (sm_{major}{minor})")
    return cards


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _missing(module: str) -> str | None:
    """Why a module cannot be imported, if it cannot."""
    try:
        importlib.import_module(module)
    except Exception as error:  # a broken installation may raise anything
        return f"{type(error).__name__}: {error}"
    return None


def _nvidia_smi(*arguments: str) -> list[str]:
    """Its lines; none where there is no driver."""
    if shutil.which("nvidia-smi") is None:
        return []
    try:
        done = subprocess.run(["nvidia-smi", *arguments], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return done.stdout.strip().splitlines() if done.returncode == 0 else []
