"""A buffer plan as a table and as a chart."""

from moe_ops.buffers import STAGES
from moe_ops.planner import BufferPlan

_MIB = 1 << 20
_RIGHT = ("MiB", "offset")
_LEFT_OUT = ("strides", "offset", "last read", "written")
"""Columns that a narrow table does without, in this order."""


def table(plan: BufferPlan, width: int | None = None) -> str:
    """One line a buffer, in address order, then the totals.

    width: characters a line; columns are left out until the buffers' lines fit. None: all columns.
    """
    layer = plan.layer
    lines = []
    for buffer in sorted(plan.buffers, key=lambda b: (b.offset, b.first)):
        told = buffer.asdict()
        lines.append(
            {
                "buffer": told["name"],
                "shape": "x".join(map(str, told["shape"])),
                "dtype": told["dtype"],
                "strides": ",".join(map(str, told["stride"])),
                "MiB": f"{told['bytes'] / _MIB:.2f}",
                "offset": str(told["offset"]),
                "written": told["written"],
                "last read": told["last_read"],
            }
        )
    widths = {name: max(len(name), *(len(line[name]) for line in lines)) for name in lines[0]}
    for name in _LEFT_OUT:
        if width is not None and sum(widths.values()) + 2 * (len(widths) - 1) > width:
            del widths[name]
    rows = ["  ".join(_cell(name, line[name], size) for name, size in widths.items()).rstrip() for line in lines]
    head = "  ".join(_cell(name, name, size) for name, size in widths.items()).rstrip()
    title = (
        f"T={layer.T} top_k={layer.top_k} E={layer.E} K={layer.K} I={layer.I} "
        f"{layer.recipe} scales={layer.scale_format} layout={layer.layout} ({plan.layout_rule})"
    )
    totals = (
        f"total {plan.total_bytes / _MIB:.2f} MiB | lower bound {plan.lower_bound_bytes / _MIB:.2f} MiB | "
        f"without reuse {plan.unplanned_bytes / _MIB:.2f} MiB"
    )
    parts = plan.chunks
    split = [f"{layer.whole} tokens in {len(parts)} chunks of at most {max(parts)}, one after another"] if parts else []
    return "\n".join([title, *split, head, *rows, totals])


def _cell(column: str, text: str, width: int) -> str:
    return text.rjust(width) if column in _RIGHT else text.ljust(width)


def _size(nbytes: int) -> str:
    return f"{nbytes / _MIB:.2f} MiB" if nbytes >= _MIB // 10 else f"{nbytes / 1024:.2f} KiB"


def chart(plan: BufferPlan, path: str) -> None:
    """Address over stage: one box a buffer."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("plan.draw: matplotlib is not installed. pip install 'fused-moe-ops[plot]'") from error
    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.subplots()
    tall = plan.total_bytes / 40
    for index, buffer in enumerate(plan.buffers):
        span = buffer.last - buffer.first + 1
        axes.broken_barh(
            [(buffer.first, span)],
            (buffer.offset / _MIB, buffer.nbytes / _MIB),
            facecolor=f"C{index}",
            edgecolor="black",
            linewidth=0.5,
            alpha=0.8,
            label=f"{buffer.name} {_size(buffer.nbytes)}",
        )
        if buffer.nbytes > tall:  # smaller boxes are named in the legend alone
            middle = (buffer.first + span / 2, (buffer.offset + buffer.nbytes / 2) / _MIB)
            axes.annotate(buffer.name, middle, ha="center", va="center")
    axes.set_xticks([i + 0.5 for i in range(len(STAGES))], STAGES)
    axes.set_xlim(0, len(STAGES))
    axes.set_ylim(0, plan.total_bytes / _MIB)
    axes.set_ylabel("address, MiB")
    axes.set_title(
        f"{plan.layer.recipe}, {plan.layer.layout}, T={plan.layer.T}: {_size(plan.total_bytes)} "
        f"instead of {_size(plan.unplanned_bytes)}"
    )
    figure.legend(loc="outside right upper", fontsize="small")
    figure.savefig(path)
