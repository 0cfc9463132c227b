"""A buffer plan as a table and as a chart."""

from moe_ops.planner import STAGES, BufferPlan

_MIB = 1 << 20


def table(plan: BufferPlan) -> str:
    """One line a buffer, in address order, then the totals."""
    layer = plan.layer
    head = ("buffer", "shape", "dtype", "strides", "MiB", "offset", "written", "last read")
    lines: list[tuple[str, ...]] = [head]
    for buffer in sorted(plan.buffers, key=lambda b: (b.offset, b.first)):
        spec = buffer.spec
        lines.append(
            (
                buffer.name,
                "x".join(map(str, spec.shape)),
                str(spec.dtype).removeprefix("torch."),
                ",".join(map(str, spec.stride)),
                f"{buffer.nbytes / _MIB:.2f}",
                str(buffer.offset),
                STAGES[buffer.first],
                STAGES[buffer.last],
            )
        )
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    right = {4, 5}
    rows = [
        "  ".join(
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]
    title = (
        f"T={layer.T} top_k={layer.top_k} E={layer.E} K={layer.K} I={layer.I} "
        f"{layer.recipe} scales={layer.scale_format} layout={layer.layout} ({plan.layout_rule})"
    )
    totals = (
        f"total {plan.total_bytes / _MIB:.2f} MiB | lower bound {plan.lower_bound_bytes / _MIB:.2f} MiB | "
        f"without reuse {plan.unplanned_bytes / _MIB:.2f} MiB"
    )
    return "\n".join([title, *rows, totals])


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
            label=f"{buffer.name} {buffer.nbytes / _MIB:.2f} MiB",
        )
        if buffer.nbytes > tall:  # smaller boxes are named in the legend alone
            middle = (buffer.first + span / 2, (buffer.offset + buffer.nbytes / 2) / _MIB)
            axes.annotate(buffer.name, middle, ha="center", va="center")
    axes.set_xticks([i + 0.5 for i in range(len(STAGES))], STAGES)
    axes.set_xlim(0, len(STAGES))
    axes.set_ylim(0, plan.total_bytes / _MIB)
    axes.set_ylabel("address, MiB")
    axes.set_title(
        f"{plan.layer.recipe}, {plan.layer.layout}, T={plan.layer.T}: {plan.total_bytes / _MIB:.1f} MiB "
        f"instead of {plan.unplanned_bytes / _MIB:.1f}"
    )
    figure.legend(loc="outside right upper", fontsize="small")
    figure.savefig(path)
