"""python -m moe_ops.bench: whole layers on this machine, checked, then timed.

On a CUDA card: device time of graph replays, median of 20 (a graph of one tiny kernel reads about 8 us this way).
On a CPU: wall time of the reference, which is there to be right, not fast.
"""

import argparse
import datetime
import importlib.metadata
import json
import platform

import torch

import moe_ops
from moe_ops.arch import default_scale_format
from moe_ops.backends import BACKENDS
from moe_ops.bench.layer import SHAPES, Shape, Timing, measured_rates, time_layer
from moe_ops.prep import MoEWeights, prepare_weights
from moe_ops.recipes import RECIPES
from moe_ops.rows import LAYOUTS


def main(arguments: list[str] | None = None) -> None:
    cuda = torch.cuda.is_available()
    names = [shape.name for shape in SHAPES]
    parser = argparse.ArgumentParser(prog="python -m moe_ops.bench", description="Times whole MoE layers.")
    parser.add_argument("--shape", nargs="+", choices=names, default=names[:2] if cuda else names[2:])
    parser.add_argument("--recipe", nargs="+", choices=list(RECIPES), default=list(RECIPES))
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 8, 64, 512, 4096] if cuda else [1, 8, 64])
    parser.add_argument("--backend", nargs="+", choices=BACKENDS, default=["auto"])
    parser.add_argument("--layout", nargs="+", choices=LAYOUTS, default=["auto"])
    parser.add_argument("--json", help="write the results, with card, date and versions, to this file")
    chosen = parser.parse_args(arguments)
    device = torch.device("cuda" if cuda else "cpu")
    rates = measured_rates() if cuda else None
    card = torch.cuda.get_device_name() if cuda else f"{platform.machine()} CPU, {torch.get_num_threads()} threads"
    print(f"moe_ops {moe_ops.__version__} | {card} | torch {torch.__version__} | {datetime.date.today()}")
    if rates is not None:
        print(f"measured here: copy {rates[0] / 1e12:.2f} TB/s, fp8 product {rates[1] / 1e12:.0f} TFLOP/s")
    print(f"{'shape':16} {'T':>6} {'recipe':10} {'layout':11} {'backend':10} {'us':>9} [p20, p80]  of floor  error")
    results = []
    for shape in (shape for shape in SHAPES if shape.name in chosen.shape):
        for recipe in chosen.recipe:
            weights = _weights(shape, recipe, device)
            for T in chosen.tokens:
                for backend in chosen.backend:
                    for layout in chosen.layout:
                        timing = time_layer(shape, T, weights, backend, layout, rates)
                        print(_line(timing), flush=True)
                        results.append(timing.row())
            del weights
    if chosen.json:
        head = dict(card=card, date=datetime.date.today().isoformat(), torch=torch.__version__, rates=rates)
        head |= {name: _version(name) for name in ("triton", "sgl-deep-gemm")}
        with open(chosen.json, "w") as file:
            json.dump({**head, "moe_ops": moe_ops.__version__, "results": results}, file, indent=1)


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _weights(shape: Shape, recipe: str, device: torch.device) -> MoEWeights:
    torch.manual_seed(0)
    w13 = torch.randn(shape.E, 2 * shape.I, shape.K, dtype=torch.bfloat16, device=device) / shape.K**0.5
    w2 = torch.randn(shape.E, shape.K, shape.I, dtype=torch.bfloat16, device=device) / shape.I**0.5
    return prepare_weights(w13, w2, recipe=recipe, scale_format=default_scale_format(RECIPES[recipe], device))


def _line(t: Timing) -> str:
    share = "-" if t.floor_us is None else f"{t.floor_us / t.us:.0%}"
    head = f"{t.shape:16} {t.T:6} {t.recipe:10} {t.layout:11} {t.backend:10}"
    return f"{head} {t.us:9.1f} [{t.p20:.1f}, {t.p80:.1f}]  {share:>8}  {t.error:.4f}"


if __name__ == "__main__":
    main()
