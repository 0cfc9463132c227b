"""python -m moe_ops.bench: whole layers on this machine, checked, then timed. See docs/benchmark.md."""

import argparse
import json
import sys

from moe_ops.backends import BACKENDS
from moe_ops.bench.cases import RECIPE_NAMES, SHAPES
from moe_ops.bench.routing import ROUTINGS
from moe_ops.bench.run import bench
from moe_ops.rows import LAYOUTS


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit code: 1 if a row of this package's own was wrong or did not run."""
    chosen = vars(_parser().parse_args(arguments))
    kept = chosen.pop("from_json")
    if kept is not None:
        from moe_ops.bench.plot import draw

        if chosen["plot"] is None:
            raise SystemExit("bench: --from-json must come with --plot FILE; got no --plot.")
        with open(kept) as file:
            draw(json.load(file), chosen["plot"])
        return 0
    return 1 if bench(**chosen).failures else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m moe_ops.bench", description="Times whole MoE layers.")
    add = parser.add_argument
    add("--shape", nargs="+", choices=[shape.name for shape in SHAPES], help="default: the two large ones on a card")
    add("--recipe", nargs="+", choices=RECIPE_NAMES, help="default: all that are of use here")
    add("--tokens", nargs="+", type=int, help="default: 1 8 64 512 4096 16384 on a card")
    add("--backend", nargs="+", choices=BACKENDS, default=["auto"])
    add("--layout", nargs="+", choices=LAYOUTS, default=["auto"])
    add("--routing", nargs="+", choices=ROUTINGS, default=["uniform"], help="others are compared with uniform")
    add("--peers", action="store_true", help="time other libraries' layers too, where installed")
    add("--quick", action="store_true", help="20 readings each; no cold, no Triton-only column")
    add("--profile", action="store_true", help="print the kernels of one replay of each row")
    add("--time-limit", type=float, metavar="SECONDS", help="start no new case after so long")
    add("--json", dest="json_path", metavar="FILE", help="write the results, with card, date and versions")
    add("--plot", metavar="FILE", help="draw the roofline chart (png, svg, pdf); needs the extra plot")
    add("--from-json", metavar="FILE", help="with --plot: draw an earlier run's results, and time nothing")
    return parser


if __name__ == "__main__":
    sys.exit(main())
