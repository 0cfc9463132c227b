"""The roofline chart of a report: rate over intensity, one panel a shape, one point a row."""

from typing import Any


def draw(report: dict[str, Any], path: str) -> None:
    """Draws to `path` (png, svg, pdf). Rows of uniform routing and backend auto; without rates, no lines.

    Raises:
        ImportError: matplotlib is missing. ValueError: the report has no such row.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("bench: matplotlib is not installed. pip install 'fused-moe-ops[plot]'") from error
    rows = [row for row in report["results"] if row["routing"] == "uniform" and row["backend"] == "auto"]
    if not rows:
        raise ValueError("bench: the report must have rows of uniform routing and backend auto; got none.")
    shapes = list(dict.fromkeys(row["shape"] for row in rows))
    recipes = list(dict.fromkeys(row["recipe"] for row in rows))
    figure = Figure(figsize=(7 * len(shapes), 6), layout="constrained")
    panels = figure.subplots(1, len(shapes), sharey=True, squeeze=False)[0]
    for axes, shape in zip(panels, shapes, strict=True):
        here = [row for row in rows if row["shape"] == shape]
        for number, recipe in enumerate(recipes):
            points = sorted((_point(row) for row in here if row["recipe"] == recipe), key=lambda point: point[0])
            if points:
                style = dict(color=f"C{number}", marker="osD^v"[number % 5], label=recipe)
                axes.plot(*zip(*points, strict=True), linewidth=0.8, **style)
        _name_tokens(axes, here)
        if report["rates"] is not None:
            _roofs(axes, report["rates"], [_point(row)[0] for row in here])
        axes.set(xscale="log", yscale="log", title=shape, xlabel="operations per byte of the touched experts' weights")
        axes.grid(True, which="both", linewidth=0.3)
        axes.margins(y=0.12)
    panels[0].set_ylabel("TFLOP/s")
    panels[0].legend(loc="lower right", fontsize="small")
    figure.suptitle(f"{report['card']}, {report['date']}, torch {report['torch']}")
    figure.savefig(path, dpi=150)


def _point(row: dict) -> tuple[float, float]:
    return row["operations"] / row["weight_bytes"], row["operations"] / row["us"] / 1e6


def _name_tokens(axes, rows: list[dict]) -> None:
    """T above the highest of the points that stand over one another, with the others of its recipe there."""
    top = {_point(row)[0]: row for row in sorted(rows, key=lambda row: _point(row)[1])}
    for x, highest in top.items():
        here = [row["T"] for row in rows if (row["recipe"], _point(row)[0]) == (highest["recipe"], x)]
        place = dict(xytext=(0, 7), textcoords="offset points", ha="center", fontsize=8)
        axes.annotate(", ".join(f"{T}" for T in sorted(here)), _point(highest), **place)


def _roofs(axes, rates: dict[str, float], xs: list[float]) -> None:
    """What this card was measured to do: the copy's slope up to each product's level."""
    left, right = min(xs) / 1.5, max(xs) * 1.5
    for name, style in (("fp8", "-"), ("bf16", "--")):
        ridge = rates[name] / rates["copy"]
        corner = [x for x in (left, ridge, right) if x <= right]
        level = [min(x * rates["copy"], rates[name]) / 1e12 for x in corner]
        axes.plot(corner, level, style, color="grey", label=f"measured: copy, {name} product", zorder=0)
