"""The warm-up itself: jobs that no manifest lists, one after another or in processes, under a lock."""

import logging
import multiprocessing
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace

import torch
from torch import nn

from moe_ops import capture, check, env
from moe_ops.checkpoints.progress import track
from moe_ops.layer import MoELayer
from moe_ops.report import LISTENERS
from moe_ops.sizes import Layer
from moe_ops.warmup.cache import Manifest, private, versions
from moe_ops.warmup.jobs import Job, jobs_of, way_of

_LOG = logging.getLogger("moe_ops")
_CONTEXT_BYTES = 1 << 30
"""Card memory set aside for a worker's CUDA context and libraries."""


@dataclass(frozen=True)
class WarmupReport:
    """What a warm-up did."""

    compiled: int
    """Jobs that were run."""
    found: int
    """Jobs that a manifest listed: another process, or an earlier start, had run them."""
    workers: int
    """Processes; 0: this one."""
    bytes: int
    """The most memory that was reckoned to be in use by it on the card, and was free before."""


def warmup(
    model: nn.Module | Iterable[nn.Module],
    tokens: Iterable[int],
    *,
    dtype: torch.dtype = torch.bfloat16,
    workers: int | None = None,
    progress: bool = True,
) -> WarmupReport:
    """Compiles the kernels that a model's MoELayers need for these token counts, so that a first call, inside a capture
    too, compiles nothing. Calls of shapes that were not asked for are then named in the log, once each.

    It runs each kind of call once, on random tokens. The first process on a machine does so; others, ranks that start
    with it or a later start, wait for its lock and find the work done. Compiled code goes where Triton and deep_gemm
    keep theirs (TRITON_CACHE_DIR, DG_JIT_CACHE_DIR); what was done is noted in MOE_OPS_CACHE_DIR, for these versions
    and this card.

    Args:
        model: a module that holds MoELayers, or several, on the device that they will run on.
        tokens: the token counts of calls: decode batches, and prefills.
        dtype: of hidden states.
        workers: processes that compile beside each other on zeros of the weights' form, as many as free memory holds.
            They are spawned: a script calls warmup under `if __name__ == "__main__":`. 0: one after another in this
            process, on the weights themselves. None: 4 on a card, else 0.
        progress: show a bar, if stderr is a terminal and rich is installed.

    Raises:
        ValueError: no MoELayer, or several devices; a token count below 1. MemoryError: the card has less free memory
            than one call takes. ImportError: filelock is missing. What a call raises.
    """
    op = "warmup"
    tokens = list(tokens)
    for T in tokens:
        check.value(isinstance(T, int) and T >= 1, op, "tokens", "counts of at least 1", T, "Leave it out.")
    roots = [model] if isinstance(model, nn.Module) else list(model)
    layers = [m for root in roots for m in root.modules() if isinstance(m, MoELayer)]
    check.value(len(layers) > 0, op, "model", "one with MoELayers", "none", "Build its experts with MoELayer.")
    devices = {layer.w2.device for layer in layers}
    rule, fix = "on one device", "Warm up the layers of each device apart."
    check.value(len(devices) == 1, op, "model", rule, sorted(map(str, devices)), fix)
    device = devices.pop()
    jobs = jobs_of(layers, tokens, device, dtype)
    folder = private(private(env.cache_dir()) / "warmup")
    manifest = Manifest(folder, versions(device))
    _watch(layers, tokens, device)
    with _lock(folder):
        done = manifest.read()
        missing = {digest: pair for digest, pair in jobs.items() if digest not in done}
        workers, needed = _bound([job for job, _ in missing.values()], device, workers)
        if missing:
            _LOG.info("warmup: %d of %d jobs, %d workers, %.1f MiB", len(missing), len(jobs), workers, needed / 2**20)
        for digest in track(_run(missing, device, workers), len(missing), "warm-up", progress):
            done.add(digest)
            manifest.write(done)
    capture.prepare(device)  # for this thread: the layers may have been made in another
    return WarmupReport(len(missing), len(jobs) - len(missing), workers, needed)


def _run(missing: dict[str, tuple[Job, MoELayer]], device: torch.device, workers: int):
    """Runs the jobs; yields the digest of each that is done."""
    if workers == 0:
        for digest, (job, layer) in missing.items():
            job.run(device, layer.expert_tensors())
            yield digest
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        running = {pool.submit(Job.run, job, str(device)): digest for digest, (job, _) in missing.items()}
        for future in as_completed(running):
            future.result()
            yield running[future]


def _bound(jobs: list[Job], device: torch.device, workers: int | None) -> tuple[int, int]:
    """(workers, bytes): as many processes as free memory holds, and what they take at most together."""
    if not jobs:
        return 0, 0
    if workers is None:
        workers = 4 if device.type == "cuda" else 0
    workers = min(workers, len(jobs))
    call = max(job.call_bytes(device) for job in jobs)
    own = max(job.call_bytes(device) + job.weight_bytes for job in jobs) + _CONTEXT_BYTES
    if device.type != "cuda":
        return workers, max(call, workers * own if workers else 0)
    free, _ = torch.cuda.mem_get_info(device)
    free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    workers = min(workers, free // own)
    needed = workers * own or call
    if needed > free:
        fix = "Warm up fewer tokens, or give the layers max_workspace_bytes."
        raise MemoryError(check.sentence("warmup", "tokens", f"of calls that fit {free} free bytes", needed, fix))
    return workers, needed


def _lock(folder):
    try:
        from filelock import FileLock
    except ImportError as error:
        raise ImportError("warmup: filelock is not installed. pip install 'fused-moe-ops[warmup]'.") from error
    return FileLock(folder / "lock")


def _watch(layers: list[MoELayer], tokens: list[int], device: torch.device) -> None:
    """Has the log name each later call of these layers that takes kernels which were not warmed."""
    for layer in layers:
        backend = layer.experts.get("backend", "auto")
        for T in tokens:
            _WARMED.add(_kind(replace(layer.sizes, T=T), backend, device))
    if _listen not in LISTENERS:
        LISTENERS.append(_listen)


_WARMED: set[tuple] = set()
"""What this process has warmed up, or said that it has not."""


def _kind(layer: Layer, backend: str, device: torch.device) -> tuple:
    whole = replace(layer, T=layer.whole, of=-1)
    return replace(whole, T=0), str(device), way_of(whole, backend, device)


def _listen(layer: Layer, backend: str, device: torch.device) -> None:
    kind = _kind(layer, backend, device)
    if kind in _WARMED:
        return
    _WARMED.add(kind)
    name = f"E={layer.E} K={layer.K} I={layer.I} top_k={layer.top_k} {layer.recipe} T={layer.whole}"
    _LOG.warning("%s on %s was not warmed up: its first call may compile. Add it to moe_ops.warmup.", name, device)
