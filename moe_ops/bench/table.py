"""python -m moe_ops.bench.table FILE...: results as Markdown tables."""

import argparse
import json
from typing import Any

_MAIN = "fp8_block"


def markdown(report: dict[str, Any]) -> str:
    """One report: a table of fp8_block beside its peers for each shape, then one of the other recipes."""
    head = ("card", "date", "torch", "triton", "sgl-deep-gemm", "transformers", "driver")
    title = ", ".join(f"{name} {report[name]}" if name != "card" else report[name] for name in head if report.get(name))
    rows = [row for row in report["results"] if row.get("routing", "uniform") == "uniform" and row["backend"] == "auto"]
    parts = [f"{title}. Microseconds."]
    for shape in dict.fromkeys(row["shape"] for row in rows):
        own = [row for row in rows if row["shape"] == shape]
        parts += [_against_peers(shape, [row for row in own if row["recipe"] == _MAIN], report.get("peers", []))]
        parts += [_other_recipes(shape, [row for row in own if row["recipe"] != _MAIN])]
    parts += [_skew([row for row in report["results"] if row.get("equal_work") is not None])]
    return "\n\n".join(part for part in parts if part)


def _against_peers(shape: str, rows: list[dict], peers: list[dict]) -> str:
    lines = []
    for row in rows:
        here = [p for p in peers if (p["shape"], p["T"]) == (shape, row["T"]) and p["us"] is not None]
        bare = [p for p in here if not p["whole"]]
        whole = [p for p in here if p["whole"] and p["recipe"] == _MAIN]
        times = [_us(row["us"]), *(_us(row.get(name)) for name in ("burst_us", "triton_us", "cold_us"))]
        lines.append([row["T"], *times, _best(whole), _best(bare), *_floor(row), f"{row['error']:.4f}"])
    names = ("us", "burst", "Triton only", "cold", "best peer's layer", "bare GEMMs", "floor", "share", "error")
    return _table(f"{shape}, {_MAIN}", ("T", *names), lines)


def _other_recipes(shape: str, rows: list[dict]) -> str:
    recipes = list(dict.fromkeys(row["recipe"] for row in rows))
    found = {(row["recipe"], row["T"]): row for row in rows}
    lines = []
    for T in dict.fromkeys(row["T"] for row in rows):
        cells = []
        for recipe in recipes:
            row = found.get((recipe, T))
            cells += ["-", "-"] if row is None else [_us(row["us"]), _us(row["floor_us"])]
        lines.append([T, *cells])
    names = [name for recipe in recipes for name in (f"`{recipe}`", "floor")]
    return _table(f"{shape}, other recipes", ("T", *names), lines)


def _skew(rows: list[dict]) -> str:
    lines = [
        [row["shape"], row["recipe"], row["T"], row["routing"], _us(row["us"]), f"{row['equal_work']:.2f}"]
        for row in rows
    ]
    return _table("Skewed routing", ("shape", "recipe", "T", "routing", "us", "over uniform at equal work"), lines)


def _best(peers: list[dict]) -> str:
    best = min(peers, key=lambda peer: peer["us"], default=None)
    if best is None:
        return "-"
    burst = "" if best.get("burst_us") is None else f" / {_us(best['burst_us'])}"
    return f"{_us(best['us'])}{burst} ({best['peer']})"


def _floor(row: dict) -> tuple[str, str]:
    floor = row["floor_us"]
    return ("-", "-") if floor is None else (_us(floor), f"{floor / row['us']:.0%}")


def _us(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}" if value < 100 else f"{value:.0f}"


def _table(title: str, names, lines: list[list]) -> str:
    if not lines:
        return ""
    rows = [names, ["---"] * len(names), *lines]
    return f"**{title}**\n\n" + "\n".join("| " + " | ".join(map(str, row)) + " |" for row in rows)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m moe_ops.bench.table", description="Results as Markdown tables.")
    parser.add_argument("file", nargs="+", help="what python -m moe_ops.bench --json wrote")
    for path in parser.parse_args(arguments).file:
        with open(path) as file:
            print(markdown(json.load(file)), end="\n\n")


if __name__ == "__main__":
    main()
