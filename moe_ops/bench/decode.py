"""python -m moe_ops.bench.decode: tokens a second of a decoding step, beside transformers' experts in the same model.

Every MoE is checked before it is timed, and every compiled or captured model against itself run eagerly. A row that
cannot run says why. `--model`, `--batch`, `--recipe`, `--experts`, `--mode` choose rows. `--small` runs on a CPU.
"""

import argparse
import gc
import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from math import inf
from time import monotonic, perf_counter
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import moe_ops
from moe_ops.arch import here
from moe_ops.bench.cases import layer_weights
from moe_ops.bench.decoder import MODELS, SMALL, Decoder, Sizes, TorchRouted
from moe_ops.bench.layer import one_line
from moe_ops.bench.peers.transformers_deepgemm import TransformersDeepGemm
from moe_ops.bench.peers.transformers_grouped_mm import TransformersGroupedMM
from moe_ops.bench.report import Report
from moe_ops.bench.timing import QUICK, Calls, Effort, Graph, Times, recorded
from moe_ops.capture import capture_stream
from moe_ops.prep import MoEWeights
from moe_ops.recipes import get_recipe
from moe_ops.reference.moe import moe as judge
from moe_ops.testing import decode_weight, relative_error
from moe_ops.testing.stacks import router_of

BATCHES = (1, 8, 64, 256)
PEERS = {"grouped_mm": TransformersGroupedMM, "deepgemm": TransformersDeepGemm}
"""Others' experts; each says which recipe's weights it reads."""
MODES = ("eager", "compiled", "graph")
"""graph: captured by hand. On a card alone."""
_BY_RECIPE = {peer.recipe: [name] for name, peer in PEERS.items()}
_MIB = 2**20
_CHECKED = 4  # tokens that the judge, a double loop, computes
_SAME = 0.3
"""Relative error of a compiled or captured model against itself run eagerly. Inductor rounds at other places, and a
route that flips in one layer goes on to the next: on an H200 the eight layers read 0.07 to 0.12, with others' experts
too. A replay that computed something else reads 1 and more."""


@dataclass(frozen=True)
class Row:
    """One model, one way to run it, one batch."""

    model: str
    experts: str
    recipe: str
    mode: str
    batch: int
    us: float
    """Of one step: wall time of a loop of steps, launches included; median."""
    tokens_per_s: float
    weights_mib: float
    """Parameters and buffers of the model: weights, KV cache, arena."""
    kept_mib: float | None
    """What warming up leaves allocated above them: eager and captured, the scratch memory that torch keeps for cuBLAS
    on that stream, of a size that does not depend on the model; compiled, what the compiled graphs keep. None: not on
    a card."""
    peak_mib: float | None
    """What warming up, capturing and a step ask the allocator for above both, at any one time."""
    error: float
    """Of the first layer's MoE against the judge."""


@dataclass(frozen=True)
class Rows:
    """Which rows are wanted."""

    models: tuple[str, ...] = ("qwen3-30b-a3b",)
    batches: tuple[int, ...] = BATCHES
    recipes: tuple[str, ...] = tuple(_BY_RECIPE)
    experts: tuple[str, ...] = ("moe_ops", *PEERS)
    modes: tuple[str, ...] = MODES
    """Of moe_ops; others' experts run compiled alone."""

    def of(self, recipe: str, device: torch.device) -> list[tuple[str, str, int]]:
        """(experts, mode, batch) in the order in which they are timed."""
        modes = [mode for mode in self.modes if device.type == "cuda" or mode != "graph"]
        ways = [("moe_ops", mode) for mode in modes]
        ways += [(peer, "compiled") for peer in _BY_RECIPE[recipe] if "compiled" in modes]
        return [(*way, batch) for way in ways if way[0] in self.experts for batch in self.batches]


def measure(
    wanted: Rows, effort: Effort, say: Callable[[str], object] = print, time_limit: float | None = None
) -> dict:
    """Times the wanted ways to run the decoders. Returns the head (card, date, versions), sizes by model, rows, and
    what did not run: also what was not begun within time_limit seconds."""
    device = here()
    limit = inf if time_limit is None else time_limit
    deadline, late = monotonic() + limit, f"not begun within {limit:g} s"
    report = Report.of_this_machine(None, None, lambda _: None)
    say(" | ".join(f"{name} {value}" for name, value in report.head.items() if value is not None))
    columns = f"{'us':>10} {'tokens/s':>10} {'MiB':>9} {'kept MiB':>9} {'peak MiB':>9}"
    say(f"{'experts':12} {'recipe':10} {'mode':9} {'batch':>5} {columns}")
    rows: list[dict] = []
    missing: list[str] = []
    failures: list[str] = []
    for model in wanted.models:
        sizes = MODELS[model]
        say(f"{model}, {sizes.layers} layers")
        for recipe in wanted.recipes:
            chosen = wanted.of(recipe, device)
            if monotonic() > deadline:
                missing += [f"{_name(model, recipe, *way)}: {late}" for way in chosen]
                continue
            if not chosen:
                continue
            weights = [layer_weights(sizes.shape, recipe, device) for _ in range(sizes.layers)]
            judged = _Judged(sizes, weights[0], device)
            for experts, mode, batch in chosen:
                name = _name(model, recipe, experts, mode, batch)
                if monotonic() > deadline:
                    missing.append(f"{name}: {late}")
                    continue
                try:
                    row = _row(sizes, experts, recipe, weights, judged, mode, batch, device, effort)
                except Exception as error:  # another library, a compiler or the driver may raise anything
                    (failures if experts == "moe_ops" else missing).append(f"{name}: {one_line(error)}")
                    say(f"{name}: {one_line(error)}")
                    continue
                finally:
                    _clean()
                rows.append(asdict(row))
                kept, peak = ("-" if mib is None else f"{mib:.1f}" for mib in (row.kept_mib, row.peak_mib))
                head = f"{experts:12} {recipe:10} {mode:9} {batch:5} {row.us:10.1f} {row.tokens_per_s:10.1f}"
                say(f"{head} {row.weights_mib:9.1f} {kept:>9} {peak:>9}")
            del weights, judged
            _clean()
    sizes_by_model = {model: asdict(MODELS[model]) for model in wanted.models}
    return report.head | dict(sizes=sizes_by_model, rows=rows, missing=missing, failures=failures)


def _name(model: str, recipe: str, experts: str, mode: str, batch: int) -> str:
    return f"{model} {experts} {recipe} {mode} batch {batch}"


def _row(
    sizes: Sizes,
    experts: str,
    recipe: str,
    weights: list[MoEWeights],
    judged: "_Judged",
    mode: str,
    batch: int,
    device: torch.device,
    effort: Effort,
) -> Row:
    moes = [_moe(experts, sizes, one, seed, device) for seed, one in enumerate(weights)]
    model = Decoder(sizes, batch, moes, device).requires_grad_(False)
    if experts == "moe_ops":
        moe_ops.share_workspace(model, max_tokens=max(batch, _CHECKED))
    error = judged.error(moes[0])
    generator = torch.Generator(device).manual_seed(batch)
    x = torch.randn(batch, sizes.shape.K, dtype=torch.bfloat16, device=device, generator=generator)
    place = torch.full((1,), sizes.context - 1, device=device)
    held = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    if experts != "moe_ops":  # they keep weights outside of nn.Module
        held += sum(t.nbytes for one in weights for t in one.tensors().values() if t is not None)
    step = (
        torch.compile(model, fullgraph=experts != "deepgemm", mode="reduce-overhead") if mode == "compiled" else model
    )
    with torch.inference_mode():
        want = model(x, place).clone()
        run = lambda: step(x, place)  # noqa: E731
        timed = _timed(run, mode, device)
        got = timed.steps.result.clone()
        if not relative_error(got, want) <= _SAME:
            raise AssertionError(f"{mode} differs from eager by {relative_error(got, want):.3f}")
        us = timed.steps.times(effort).us
    way = (sizes.shape.name, experts, recipe, mode, batch)
    return Row(*way, us, 1e6 * batch / us, held / _MIB, timed.kept_mib, timed.peak_mib, error)


class Timed(NamedTuple):
    """Something that can be timed, and the MiB that it took: what stays, and the most above it."""

    steps: "Steps | Graph | Calls"
    kept_mib: float | None
    peak_mib: float | None


def _timed(run: Callable[[], Tensor], mode: str, device: torch.device) -> Timed:
    if device.type != "cuda":
        for _ in range(2):  # compiles
            run()
        return Timed(recorded(run, device), None, None)
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()  # else rows would share what the first of them took
    torch.cuda.reset_peak_memory_stats()
    before = _requested("current")
    if mode == "graph":
        capture_stream(device).warm_up(run)
    else:
        for _ in range(3):  # compiles; reduce-overhead warms up and records
            run()
    kept = _requested("current") - before
    if mode == "graph":
        graph = Graph(run)
        graph.replay()  # a capture computes nothing
        steps = Steps(graph.replay, graph.result)
    else:
        steps = Steps(run, run())
    return Timed(steps, kept / _MIB, (_requested("peak") - before - kept) / _MIB)


def _requested(what: str) -> int:
    """Bytes that were asked for of torch's allocator: now, or at most since the last reset."""
    torch.cuda.synchronize()
    return torch.cuda.memory_stats()[f"requested_bytes.all.{what}"]


class Steps:
    """Steps one after another as a decoding loop makes them: wall time, launches included."""

    def __init__(self, run: Callable[[], object], result: Tensor):
        self._run = run
        self.result = result

    def times(self, effort: Effort) -> Times:
        readings: list[float] = []
        start = perf_counter()
        while len(readings) < effort.least or perf_counter() - start < effort.warm_up:
            torch.cuda.synchronize()
            before = perf_counter()
            for _ in range(10):
                self._run()
            torch.cuda.synchronize()
            readings.append(1e5 * (perf_counter() - before))
        return Times.of(readings[len(readings) // 2 :])


def _moe(experts: str, sizes: Sizes, weights: MoEWeights, seed: int, device: torch.device) -> nn.Module:
    shape = sizes.shape
    router = router_of(shape.E, shape.K, device, seed)
    if experts == "moe_ops":
        return moe_ops.MoELayer(router, weights, top_k=shape.top_k)
    peer = PEERS[experts](SimpleNamespace(shape=shape, weights=weights, device=device))  # type: ignore[arg-type]
    reason = peer.why_not()
    if reason is not None:
        raise RuntimeError(reason)
    return TorchRouted(router, shape.top_k, peer.function(), peer.module())


class _Judged:
    """What the judge, a double loop, says of the first layer's MoE for a few tokens."""

    def __init__(self, sizes: Sizes, weights: MoEWeights, device: torch.device):
        shape = sizes.shape
        self._row = get_recipe("bench", weights.recipe)
        generator = torch.Generator(device).manual_seed(7)
        self._x = torch.randn(_CHECKED, shape.K, dtype=torch.bfloat16, device=device, generator=generator)
        logits = torch.nn.functional.linear(self._x, router_of(shape.E, shape.K, device, 0))
        topk_weights, topk_ids = torch.ops.moe.topk(logits, shape.top_k)
        used = topk_ids.unique().long()  # the others need not be decoded

        def values(w: Tensor, scale: Tensor | None) -> Tensor:
            return decode_weight(w[used].cpu(), None if scale is None else scale[used].cpu(), self._row)

        w13, w2 = values(weights.w13, weights.w13_scale), values(weights.w2, weights.w2_scale)
        local = torch.searchsorted(used, topk_ids.long()).int().cpu()
        self._want = judge(self._x.cpu(), topk_weights.cpu(), local, w13, w2)

    def error(self, moe: nn.Module) -> float:
        """Relative error of such an MoE.

        Raises:
            AssertionError: it is above what the recipe allows.
        """
        with torch.inference_mode():
            error = relative_error(moe(self._x).cpu(), self._want)
        if not error <= self._row.max_diff:
            raise AssertionError(f"error {error:.3f} of the MoE above {self._row.max_diff}")
        return error


def _clean() -> None:
    torch._dynamo.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit code: 1 if a row of this package's own was wrong or did not run."""
    parser = argparse.ArgumentParser(prog="python -m moe_ops.bench.decode", description="Times decoding steps.")
    add = parser.add_argument
    add("--small", action="store_true", help="a tiny model, batch 4: for a CPU")
    add("--model", nargs="+", choices=MODELS, help="default: qwen3-30b-a3b")
    add("--batch", nargs="+", type=int, help="default: 1 8 64 256")
    add("--recipe", nargs="+", choices=_BY_RECIPE, help="default: both")
    add("--experts", nargs="+", choices=("moe_ops", *PEERS), help="default: all")
    add("--mode", nargs="+", choices=MODES, help="of moe_ops; default: all that the device has")
    add("--time-limit", type=float, metavar="SECONDS", help="begin no new row after so long")
    add("--json", dest="path", metavar="FILE", help="write the results, with card, date and versions")
    chosen = parser.parse_args(arguments)
    names = dict(models=chosen.model, batches=chosen.batch, recipes=chosen.recipe)
    names |= dict(experts=chosen.experts, modes=chosen.mode)
    given: dict[str, Any] = {name: tuple(values) for name, values in names.items() if values}
    wanted = Rows()
    if chosen.small and chosen.model:
        parser.error("--small is a model of its own: leave out --model")
    if chosen.small:
        torch.set_num_threads(1)  # tiny products: threads would wait for one another
        wanted = Rows(models=(SMALL.shape.name,), batches=(4,))
    wanted = replace(wanted, **given)
    if not any(wanted.of(recipe, here()) for recipe in wanted.recipes):
        parser.error(
            f"no such row on {here().type}: graphs need a card, others' experts run compiled alone, and of "
            f"{', '.join(f'{name} {peer.recipe}' for name, peer in PEERS.items())}"
        )
    found = measure(wanted, QUICK if chosen.small else Effort(), time_limit=chosen.time_limit)
    if chosen.path:
        with open(chosen.path, "w") as file:
            json.dump(found, file, indent=1)
    return 1 if found["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
