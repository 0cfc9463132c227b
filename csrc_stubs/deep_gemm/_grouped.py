"""The two grouped loops, shared by the dtypes: checks first, then one product a group."""

from collections.abc import Iterator

import torch

from . import _check
from ._arch import arch_major
from ._check import require
from ._matrix import Matrix, check_bf16, check_k_major, check_kernel, check_quantised, check_same_k
from .scales import Scaling, with_scales
from .settings import check_block_rows

Part = tuple[int, torch.Tensor | slice]  # a group and its rows


def _multiply(
    a: Matrix,
    b: Matrix,
    group: int,
    rows: torch.Tensor | slice,
    d: torch.Tensor,
) -> None:
    """d[rows] = a[rows] @ b[group].T, rounded once; a and d are the group's own if 3-D."""
    slab = group if a.values.dim() == 3 else None
    product = a.dequantise(slab, rows) @ b.dequantise(group).mT
    (d if slab is None else d[slab])[rows] = product.to(d.dtype)


def _blocks_by_first_row(
    op: str,
    layout: torch.Tensor,
    block: int,
    num_groups: int,
) -> Iterator[Part]:
    """(group, rows) of every group that owns a block."""
    first = layout[::block]
    bad = (first >= num_groups).nonzero()
    if len(bad):
        row = int(bad[0]) * block
        rule, fix = f"a group below {num_groups}, or negative", "Mark rows without one by -1."
        require(False, op, f"grouped_layout[{row}]", rule, int(layout[row]), fix)
    owner = first.repeat_interleave(block)[: len(layout)]
    for group in first.unique().tolist():
        if group >= 0:
            yield group, (owner == group).nonzero()[:, 0]


def _blocks_by_psum(
    op: str,
    psum: torch.Tensor,
    block: int,
    m: int,
    whole_blocks: bool,
) -> Iterator[Part]:
    """(group, rows) of every group with rows: from the last end, rounded up, to its own."""
    start = 0
    for group, end in enumerate(psum.tolist()):
        rule = f"in {start}..{m}: between the aligned end of the group before and m"
        fix = f"An empty group ends where it starts, at a multiple of {block}."
        require(start <= end <= m, op, f"grouped_layout[{group}]", rule, end, fix)
        aligned = -(-end // block) * block
        if end > start:
            yield group, slice(start, min(aligned, m) if whole_blocks else end)
        start = aligned


def multiply_contiguous(
    op: str,
    a: Matrix,
    b: Matrix,
    scales: Scaling | None,
    d: torch.Tensor,
    grouped_layout: torch.Tensor,
    use_psum_layout: bool,
    ensure_zero_padding: bool,
    expected_m: int | None,
) -> None:
    """a 2-D, b 3-D. scales is None for bf16."""
    check_k_major(op, a=a)
    if scales is None:
        check_bf16(op, a=a, b=b)
    else:
        check_quantised(op, a=a, b=b)
        if arch_major() == 9:
            check_k_major(op, b=b)
    check_same_k(op, a, b)
    got = f"{b.num_groups} groups, n={b.mn}, k={b.k}"
    ok = min(b.num_groups, b.mn, b.k) > 0
    require(ok, op, "b", "non-empty", got, "Skip the call.")
    _check.output(op, d, (a.mn, b.mn), "(m, n)", [torch.bfloat16])
    length, letter = (b.num_groups, "num_groups") if use_psum_layout else (a.mn, "m")
    _check.group_layout(op, "grouped_layout", grouped_layout, length, letter)
    ok = expected_m is None or use_psum_layout
    rule = "None without use_psum_layout"
    require(ok, op, "expected_m_for_psum_layout", rule, expected_m, "Drop it.")
    if a.mn == 0:
        return
    if scales is not None:
        a, b = with_scales(op, a, b, scales, grouped_layout if use_psum_layout else None)
    _check_grouped_kernel(op, a, b, d)
    block = check_block_rows(op, b.mn)
    if use_psum_layout:
        parts = _blocks_by_psum(op, grouped_layout, block, a.mn, ensure_zero_padding)
    else:
        parts = _blocks_by_first_row(op, grouped_layout, block, b.num_groups)
    for group, rows in list(parts):  # all of the layout is checked before anything is written
        _multiply(a, b, group, rows, d)


def multiply_masked(
    op: str,
    a: Matrix,
    b: Matrix,
    scales: Scaling | None,
    d: torch.Tensor,
    masked_m: torch.Tensor,
    expected_m: int,
) -> None:
    """a and b 3-D. scales is None for bf16."""
    check_k_major(op, a=a, b=b)
    (check_bf16 if scales is None else check_quantised)(op, a=a, b=b)
    rule, got = f"of a's {a.num_groups} groups", f"{b.num_groups} groups"
    fix = "Both have one matrix a local expert."
    require(a.num_groups == b.num_groups, op, "b", rule, got, fix)
    check_same_k(op, a, b)
    fix = "It is a hint for tile sizes: clamp it to at least 1."
    require(expected_m > 0, op, "expected_m", "positive", expected_m, fix)
    got = f"groups={a.num_groups}, m={a.mn}, n={b.mn}, k={a.k}"
    ok = min(a.num_groups, a.mn, b.mn, a.k) > 0
    require(ok, op, "sizes", "all positive", got, "Skip the call: no empty slab has a kernel.")
    _check.output(op, d, (a.num_groups, a.mn, b.mn), "(num_groups, m, n)", [torch.bfloat16])
    _check.group_layout(op, "masked_m", masked_m, a.num_groups, "num_groups")
    if scales is not None:
        a, b = with_scales(op, a, b, scales)
    _check_grouped_kernel(op, a, b, d)
    counts = masked_m.tolist()
    for group, count in enumerate(counts):
        rule, fix = f"in 0..{a.mn}, the rows of a slab", "Cap it, or widen the slabs."
        require(0 <= count <= a.mn, op, f"masked_m[{group}]", rule, count, fix)
    for group, count in enumerate(counts):
        if count:
            _multiply(a, b, group, slice(0, count), d)


def _check_grouped_kernel(op: str, a: Matrix, b: Matrix, d: torch.Tensor) -> None:
    if arch_major() == 9 and a.scale is None:
        fix = "Pad a and b with zero columns."
        require(a.k % 64 == 0, op, "k", "a multiple of 64 on sm90", a.k, fix)
    if arch_major() == 9:
        fix = "Pad b with zero rows."
        require(b.mn % 8 == 0, op, "n", "a multiple of 8 on sm90", b.mn, fix)
    check_kernel(op, a, b, d)
