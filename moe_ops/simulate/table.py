"""TimeTable: measured layer times, carried over to other sizes by what no layer can beat."""

import json
import math
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from torch import Tensor

from moe_ops import check
from moe_ops.bench.cases import SHAPES
from moe_ops.recipes import RECIPES

_OP = "simulate"


@dataclass(frozen=True)
class TimeTable:
    """Rows of python -m moe_ops.bench --json. Times are of whole layers in the layout that auto took, with uniform
    routing. A size in between: its own floor (reading the touched weights, or the operations, at the measured rates)
    times how far above its floor the nearest measured layer was, interpolated over mean rows an expert, both in
    logarithms.
    """

    name: str
    rates: dict[str, float]
    rows: tuple[dict[str, Any], ...]

    @classmethod
    def load(cls, path: Path | None = None) -> "TimeTable":
        """path: a JSON file of the benchmark; None: the one that comes with the package."""
        if path is None:
            text = resources.files("moe_ops.simulate").joinpath("layer_h200.json").read_text()
        else:
            text = path.read_text()
        try:
            found = json.loads(text)
            return cls.of(found)
        except (KeyError, TypeError, json.JSONDecodeError) as error:
            got, fix = f"{path}, {type(error).__name__}", "Write one with python -m moe_ops.bench --json FILE."
            raise ValueError(check.sentence(_OP, "table", "a report of the benchmark", got, fix)) from None

    @classmethod
    def of(cls, found: dict[str, Any]) -> "TimeTable":
        kept = [row for row in found["results"] if row["routing"] == "uniform" and row["us"]]
        return cls(f"{found['card']}, {found['date']}", dict(found["rates"]), tuple(kept))

    def check(self, recipe: str) -> None:
        """Refuses a recipe that nobody timed."""
        names = sorted({row["recipe"] for row in self.rows})
        fix = f"The table has {', '.join(names)}. Pass --table with times of this recipe."
        check.value(recipe in names, _OP, "recipe", "one that the table of times holds", recipe, fix)

    def microseconds(self, recipe: str, K: int, I: int, rows: Tensor) -> float:
        """Of one rank's experts, `rows` (E,) of each. 0 without a row."""
        total = int(rows.sum())
        if total == 0:
            return 0.0
        return self.floor(recipe, K, I, int((rows > 0).sum()), total) * self._above(recipe, K, I, total / len(rows))

    def measured(self, recipe: str, mean: float, K: int, I: int) -> bool:
        """Whether so many mean rows an expert lie within what was timed."""
        points = self._points(recipe, K, I)
        return points[0][0] <= mean <= points[-1][0]

    def floor(self, recipe: str, K: int, I: int, touched: int, rows: int) -> float:
        """Microseconds: the longer of reading the touched experts' weights and doing the operations."""
        form = RECIPES[recipe]
        nbytes = touched * 3 * I * K * form.w_dtype.itemsize / form.w_pack
        return 1e6 * max(
            nbytes / self.rates["copy"], 6 * rows * I * K / self.rates["fp8" if form.quantised else "bf16"]
        )

    def _points(self, recipe: str, K: int, I: int) -> list[tuple[float, float]]:
        """(mean rows an expert, time over floor) of the layer whose expert is the nearest in size."""
        self.check(recipe)
        timed = {row["shape"] for row in self.rows if row["recipe"] == recipe}
        shapes = [shape for shape in SHAPES if shape.name in timed]
        names = ", ".join(shape.name for shape in SHAPES)
        check.value(bool(shapes), _OP, "table", f"of shapes {names}", ", ".join(sorted(timed)), "Time one of them.")
        near = min(shapes, key=lambda shape: abs(math.log(shape.K * shape.I / (K * I))))
        points = []
        for row in self.rows:
            if row["recipe"] == recipe and row["shape"] == near.name:
                routes = row["T"] * near.top_k
                points.append((routes / near.E, row["us"] / self.floor(recipe, near.K, near.I, row["touched"], routes)))
        return sorted(points)

    def _above(self, recipe: str, K: int, I: int, mean: float) -> float:
        points = self._points(recipe, K, I)
        if mean <= points[0][0]:
            return points[0][1]
        for (a, low), (b, high) in zip(points, points[1:], strict=False):
            if mean <= b:
                return low * (high / low) ** (math.log(mean / a) / math.log(b / a))
        return points[-1][1]
