"""Predictions as rows of words, as JSON and as a chart."""

from typing import Any

import torch
from torch import Tensor

from moe_ops.simulate.links import Links
from moe_ops.simulate.predict import Prediction, Scenario

COLUMNS = ("format", "wire", "layout", "dispatch", "GEMMs", "combine", "layer", "sent in a node", "to others", "memory")
_PARTS = ("dispatch_us", "gemm_us", "combine_us")


def cells(row: Prediction, links: Links) -> tuple[str, ...]:
    """One row of COLUMNS: the times of the slowest rank, the bytes of the busiest, the memory of the fullest."""
    assert row.memory is not None
    sent = [max_sent(part, links) for part in (row.dispatch, row.combine)]
    intra, inter = (sum(part[i] for part in sent) for i in range(2))
    times = [part if part is None else float(part.max()) for part in (row.dispatch_us, row.gemm_us, row.combine_us)]
    micros = [microseconds(us) for us in (*times, row.us)]
    return row.format, row.wire, row.layout, *micros, size(intra), size(inter), size(row.memory.total)


def max_sent(nbytes: Tensor | None, links: Links) -> tuple[float, float]:
    """(within its node, to other nodes) of the rank that sends most there."""
    assert nbytes is not None
    intra, inter = links.sent(nbytes)
    return float(intra.max()), float(inter.max())


def microseconds(us: float | None) -> str:
    return "-" if us is None else f"{us:.0f} us" if us < 1e4 else f"{us / 1000:.1f} ms"


def size(nbytes: float) -> str:
    if nbytes == 0:
        return "-"
    return f"{nbytes / 2**30:.2f} GiB" if nbytes >= 1 << 30 else f"{nbytes / 2**20:.2f} MiB"


def load(scenario: Scenario) -> dict[str, Any]:
    """How even the work of the ranks is: rows of the fullest, of all on average, and which it is."""
    rows = scenario.rows.sum(1).double()
    fullest, mean = int(rows.argmax()), float(rows.mean())
    rank = fullest * scenario.sizes.moe_tp
    over = float(rows.max()) / mean if mean else 1.0
    return dict(slowest_rank=rank, rows=int(rows.max()), mean_rows=mean, over_mean=over)


def as_dict(row: Prediction, links: Links) -> dict[str, Any]:
    """For JSON. Times in microseconds, sizes in bytes."""
    if row.refused is not None:
        return dict(format=row.format, wire=row.wire, refused=row.refused)
    assert row.memory is not None
    found: dict[str, Any] = dict(format=row.format, wire=row.wire, layout=row.layout, form=str(row.form), us=row.us)
    for name in _PARTS:
        part = getattr(row, name)
        if part is not None:
            found[name] = dict(max=float(part.max()), mean=float(part.mean()), slowest_rank=int(part.argmax()))
    for name in ("dispatch", "combine"):
        intra, inter = max_sent(getattr(row, name), links)
        found[f"{name}_bytes"] = dict(intra=intra, inter=inter)
    found["memory_bytes"] = dict(**vars(row.memory), total=row.memory.total)
    return dict(**found, capacity_filled=row.filled)


def chart(rows: list[Prediction], scenario: Scenario, path: str) -> None:
    """Draws the layer's time by format, and how full the ranks are, to `path` (png, svg, pdf)."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("simulate: matplotlib is not installed. pip install 'fused-moe-ops[plot]'") from error
    figure = Figure(figsize=(10, 4), layout="constrained")
    bars, ranks = figure.subplots(1, 2, width_ratios=(3, 2))
    shown = [row for row in rows if row.refused is None][::-1]
    names, left = [f"{row.format} ({row.wire})" for row in shown], torch.zeros(len(shown))
    for part, label in zip(_PARTS, ("dispatch", "GEMMs", "combine"), strict=True):
        values = [getattr(row, part) for row in shown]
        width = torch.tensor([0.0 if value is None else float(value.max()) for value in values])
        bars.barh(names, width.tolist(), left=left.tolist(), label=label)
        left += width
    bars.set_xlabel("us, the slowest rank of each part")
    bars.legend()
    counts = scenario.rows.sum(1).sort(descending=True).values.tolist()
    ranks.step(range(len(counts)), counts, where="mid")
    ranks.axhline(sum(counts) / len(counts), color="grey", linewidth=0.8)
    ranks.set_xlabel("expert groups, fullest first")
    ranks.set_ylabel("rows")
    ranks.set_ylim(bottom=0)
    figure.savefig(path)
