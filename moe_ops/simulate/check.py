"""The prediction held against real runs: python -m moe_ops.simulate.check

Four gloo processes of this machine run every format. Bytes and memory must agree exactly, and results with one process
(exit code 1 otherwise). Times are predicted from links that the same run measures by a plain all-to-all, and from layer
times that it takes at other token counts; how far off they are is printed, and is no failure: the exchange on paper
knows nothing of the quantising, sorting and adding up around it, nor of processes that share cores.
"""

import argparse
import time
from dataclasses import replace

import torch

from moe_ops.bench.cases import SHAPES, Case, layer_weights
from moe_ops.dispatch import FORMATS
from moe_ops.parallel import ParallelSizes
from moe_ops.recipes import get_recipe
from moe_ops.simulate.links import Links
from moe_ops.simulate.measure import Measured, run_links, run_measured
from moe_ops.simulate.predict import Prediction, Scenario, predict
from moe_ops.simulate.table import TimeTable
from moe_ops.testing.dispatch_cases import DispatchCase
from moe_ops.testing.parallel_cases import HashRouter, ParallelCase, token_ids_of
from moe_ops.testing.ranks import RankPool

RANKS = 4
SMALL, LARGE = 1 << 10, 1 << 20
"""Bytes of the all-to-alls that measure latency and rate."""


def scenario_of(case: DispatchCase) -> Scenario:
    """A dispatch case on paper."""
    (_, _, ids), weights = case.build()
    sizes = ParallelSizes(attn_dp=case.ranks, ep=case.ranks)
    form = (case.K, case.I, case.top_k, case.recipe, weights.scale_format, ids.split(case.tokens), case.max_tokens)
    return Scenario(sizes, case.E, *form, per_node=case.ranks, payload=case.payload, arch="cpu")


def scenario_of_layer(case: ParallelCase) -> Scenario:
    """A whole layer on paper."""
    x, _ = case.inputs()
    _, ids = HashRouter(case.E, case.top_k)(x, token_ids_of(x))
    scale_format = get_recipe("simulate", case.recipe).scale_formats[0]
    form = (case.K, case.I // case.sizes.moe_tp, case.top_k, case.recipe, scale_format)
    groups = ids.split(case.tokens)
    return Scenario(case.sizes, case.E, *form, groups, case.max_tokens, per_node=case.sizes.world, arch="cpu")


def disagreements(predicted: Prediction, measured: list[Measured]) -> list[str]:
    """What does not agree exactly, with both numbers."""
    assert predicted.dispatch is not None and predicted.combine is not None and predicted.memory is not None
    sent = {
        "dispatch": (predicted.dispatch.tolist(), [rank.dispatch for rank in measured]),
        "combine": (predicted.combine.tolist(), [rank.combine for rank in measured]),
    }
    held = {
        name: (getattr(predicted.memory, name), max(getattr(rank, name) for rank in measured))
        for name in ("weights", "experts", "exchange")
    }
    return [f"{name}: predicted {a}, got {b}" for name, (a, b) in {**sent, **held}.items() if a != b]


def measured_links(pool: RankPool, repeats: int) -> Links:
    """One node; the rate and the latency that two sizes of a plain all-to-all have."""
    small, large = (max(pool.run(RANKS, run_links, nbytes, repeats)) for nbytes in (SMALL, LARGE))
    away = (RANKS - 1) * 1e-3  # GB/s from bytes a microsecond
    rate = away * (LARGE - SMALL) / max(large - small, 1e-9)
    return Links(per_node=RANKS, intra=rate, latency_us=max(0.0, small - away * SMALL / rate))


def check_layer_times(tokens: tuple[int, ...], asked: int) -> tuple[float, float]:
    """(predicted, measured) microseconds of a small layer at `asked` tokens, from times at other counts."""
    torch.set_num_threads(1)  # as the ranks have it
    shape = next(shape for shape in SHAPES if shape.name == "tiny")
    weights = layer_weights(shape, "fp8_block", torch.device("cpu"))
    timed = {T: (Case(shape, T, "fp8_block", weights), 0.0) for T in (*tokens, asked)}
    for T, (case, _) in timed.items():
        timed[T] = (case, _best(lambda case=case: case.run("auto")))
    rows = [
        dict(shape=shape.name, T=T, recipe="fp8_block", routing="uniform", us=timed[T][1], touched=timed[T][0].touched)
        for T in tokens
    ]
    rates = dict(copy=1e10, bf16=1e10, fp8=1e10)  # they cancel: one shape, all its experts touched
    found = TimeTable.of(dict(card="this machine", date="now", rates=rates, results=rows))
    counts = torch.bincount(timed[asked][0].inputs[2].flatten().long(), minlength=shape.E)
    return found.microseconds("fp8_block", shape.K, shape.I, counts), timed[asked][1]


def left_out(found: TimeTable) -> list[float]:
    """Relative error of each measured layer when it is predicted from the others; not of the first and last counts."""
    errors = []
    for row in found.rows:
        same = [r["T"] for r in found.rows if (r["shape"], r["recipe"]) == (row["shape"], row["recipe"])]
        if min(same) < row["T"] < max(same):
            shape = next(shape for shape in SHAPES if shape.name == row["shape"])
            counts = torch.zeros(shape.E, dtype=torch.int64)
            counts[: row["touched"]] = 1
            counts[0] += row["T"] * shape.top_k - row["touched"]
            others = replace(found, rows=tuple(r for r in found.rows if r is not row))
            errors.append(others.microseconds(row["recipe"], shape.K, shape.I, counts) / row["us"] - 1)
    return errors


def _best(call, repeats: int = 9) -> float:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(1e6 * (time.perf_counter() - start))
    return sorted(times)[repeats // 2]


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit code: 1 if bytes, memory or results differ."""
    parser = argparse.ArgumentParser(prog="python -m moe_ops.simulate.check", description="Predictions against runs.")
    parser.add_argument("--repeats", type=int, default=15, help="readings of each exchange")
    repeats = parser.parse_args(arguments).repeats
    pool, wrong = RankPool((RANKS,)), []
    try:
        links = measured_links(pool, repeats)
        print(f"Links by a plain all-to-all: {links.intra:.2f} GB/s a rank, {links.latency_us:.0f} us")
        print(
            f"{'format':19}{'recipe':10}{'exact':8}{'KiB a rank':>10}   dispatch and combine, us: measured, predicted"
        )
        for recipe in ("bf16", "fp8_block"):
            for name in (name for name, form in FORMATS.items() if form.reduces):
                case = DispatchCase(name, recipe, (64, 0, 48, 16), K=2048, max_tokens=64)
                measured = pool.run(RANKS, run_measured, case, repeats)
                row = predict(scenario_of(case), name, "torch", links, None)
                off = disagreements(row, measured)
                if not torch.equal(torch.cat([rank.out for rank in measured]), case.expected(FORMATS[name])):
                    off.append("the result is not that of one process")
                wrong += [f"{name} {recipe}: {line}" for line in off]
                print(_line(row, recipe, measured, links, not off), flush=True)
    finally:
        pool.close()
    paper, real = check_layer_times((16, 64, 1024), 256)
    line = f"Layer (tiny, fp8_block, T=256) from its times at T=16, 64 and 1024: {real:.0f} us measured"
    print(f"{line}, {paper:.0f} predicted ({100 * (paper - real) / real:+.0f} %)")
    found = TimeTable.load()
    errors = left_out(found)
    line = f"Each of {len(errors)} layers measured on {found.name}, predicted from the others"
    print(f"{line}: {100 * min(errors):+.0f} % to {100 * max(errors):+.0f} %")
    print(*wrong, "Bytes, memory and results agree exactly." if not wrong else f"{len(wrong)} disagree.", sep="\n")
    return int(bool(wrong))


def _line(row: Prediction, recipe: str, measured: list[Measured], links: Links, exact: bool) -> str:
    assert row.dispatch is not None and row.combine is not None
    kib = sum(float(links.sent(part)[0].max()) for part in (row.dispatch, row.combine)) / 1024
    line = f"{row.format:19}{recipe:10}{'yes' if exact else 'NO':8}{kib:10.0f}  "
    for part in ("dispatch_us", "combine_us"):
        real, paper = max(getattr(rank, part) for rank in measured), float(getattr(row, part).max())
        line += f"{real:7.0f}{paper:7.0f} ({100 * (paper - real) / real:+.0f} %)"
    return line


if __name__ == "__main__":
    raise SystemExit(main())
