"""The buffer plan: contracts + stage order -> lifetimes -> offsets in one workspace.

Lifetimes of the forward form a chain: each stage reads what the stage before wrote and writes what the next one reads.
So buffers take turns at the two ends of the arena (even stages at the bottom, odd ones at the top), and those that live
longer than one hand-over stand below all of them. Two neighbours never overlap when the arena is as long as the longest
pair, and no arena can be shorter: the plan is optimal by construction, needs no search, and the same code gives the
size of a traced token count. (Placing greedily by size is not optimal here: bf16 with K > 2 I takes a fifth more.)
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from moe_ops import check
from moe_ops.meta.grouped_gemm import gemm_spec
from moe_ops.meta.pre_permute import contiguous_specs, masked_specs
from moe_ops.meta.quantize import row_specs
from moe_ops.recipes import get_recipe
from moe_ops.rows import AUTO_RULE, LAYOUTS, MASKED_TOKENS, align, choose_layout
from moe_ops.spec import ALIGNMENT, TensorSpec

STAGES = ("pre_permute", "gemm1", "silu_and_quant", "gemm2", "post_permute")


@dataclass(frozen=True)
class Layer:
    """The sizes that fix a plan. T (tokens) and top_k come with the call, the rest with the weights."""

    T: int
    top_k: int
    E: int
    K: int
    I: int
    recipe: str
    scale_format: str
    layout: str = "auto"

    def resolved(self) -> "Layer":
        """With `auto` decided from the token count."""
        return self if self.layout != "auto" else self.with_layout(choose_layout(self.T))

    def with_layout(self, layout: str, T=None) -> "Layer":
        T = self.T if T is None else T
        return Layer(T, self.top_k, self.E, self.K, self.I, self.recipe, self.scale_format, layout)


@dataclass(frozen=True)
class Buffer:
    """One tensor of the workspace. It is written in stage `first`, last read in stage `last`, and lies at `offset`."""

    name: str
    spec: TensorSpec
    first: int
    last: int
    offset: int = 0

    @property
    def nbytes(self):
        """Bytes taken, rounded up to the alignment of offsets."""
        return align(self.spec.nbytes, ALIGNMENT)

    def at(self, offset: int) -> "Buffer":
        return Buffer(self.name, self.spec, self.first, self.last, offset)


def buffers_of(layer: Layer) -> list[Buffer]:
    """The buffers of a contiguous or masked forward with their lifetimes, not placed yet."""
    recipe = get_recipe("plan", layer.recipe, layer.scale_format)
    specs = contiguous_specs if layer.layout == "contiguous" else masked_specs
    x_q, x_scale, row_map, src2dst = specs(layer.T, layer.K, layer.top_k, layer.E, recipe, layer.scale_format)
    rows = x_q.shape[:-1]
    act_q, act_scale = row_specs(*rows, layer.I, recipe=recipe, scale_format=layer.scale_format)
    return [
        Buffer("src2dst", src2dst, 0, 4),
        Buffer("m_indices" if layer.layout == "contiguous" else "masked_m", row_map, 0, 3),
        Buffer("x_q", x_q, 0, 1),
        Buffer("x_scale", x_scale, 0, 1),
        Buffer("gateup", gemm_spec(*rows, N=2 * layer.I), 1, 2),
        Buffer("act_q", act_q, 2, 3),
        Buffer("act_scale", act_scale, 2, 3),
        Buffer("down", gemm_spec(*rows, N=layer.K), 3, 4),
    ]


def workspace_bytes(layer: Layer) -> Any:
    """Bytes that are enough for every token count up to T. SymInt-safe; `auto` counts both layouts."""
    if layer.layout != "auto":
        return _extent(buffers_of(layer))
    few = layer.with_layout("masked", torch.sym_min(layer.T, MASKED_TOKENS[1]))
    return torch.sym_max(_extent(buffers_of(layer.with_layout("contiguous"))), _extent(buffers_of(few)))


def place(buffers: list[Buffer]) -> tuple[list[Buffer], int]:
    """Gives each buffer its offset; returns them with the length of the arena."""
    total = _extent(buffers)
    placed, bottom = [], 0
    for buffer in buffers:
        if _stands(buffer):
            placed.append(buffer.at(bottom))
            bottom += buffer.nbytes
    for stage in range(len(STAGES)):
        low, high = bottom, total
        for buffer in buffers:
            if buffer.first != stage or _stands(buffer):
                continue
            if stage % 2:
                high -= buffer.nbytes
                placed.append(buffer.at(high))
            else:
                placed.append(buffer.at(low))
                low += buffer.nbytes
    return placed, total


def _stands(buffer: Buffer) -> bool:
    return buffer.last > buffer.first + 1


def _extent(buffers: list[Buffer]) -> Any:
    """Bytes of the standing buffers and of the longest pair of neighbours: an int, or a SymInt while traced."""
    standing = sum(buffer.nbytes for buffer in buffers if _stands(buffer))
    written = [sum(b.nbytes for b in buffers if b.first == i and not _stands(b)) for i in range(len(STAGES))]
    longest = 0
    for one, next_one in zip(written, written[1:], strict=False):
        longest = torch.sym_max(longest, one + next_one)
    return standing + longest


@dataclass(frozen=True)
class BufferPlan:
    """Every byte of a forward's scratch memory, and when it lives. `print(plan)` shows it as a table."""

    layer: Layer
    buffers: tuple[Buffer, ...]
    total_bytes: int
    workspace_bytes: int
    """Enough for this and every smaller T: what to allocate once for calls of many sizes."""
    layout_rule: str
    """Why the layout is what it is."""

    @property
    def lower_bound_bytes(self) -> int:
        """The most bytes alive in one stage: no arrangement takes less."""
        live = [sum(b.nbytes for b in self.buffers if b.first <= i <= b.last) for i in range(len(STAGES))]
        return max(live)

    @property
    def unplanned_bytes(self) -> int:
        """What the buffers take together when none is reused."""
        return sum(buffer.nbytes for buffer in self.buffers)

    def view(self, name: str, ws: torch.Tensor) -> torch.Tensor:
        """One buffer as a tensor on the flat uint8 tensor `ws`."""
        buffer = next(buffer for buffer in self.buffers if buffer.name == name)
        return buffer.spec.carve(ws, buffer.offset)

    def __str__(self) -> str:
        from moe_ops.plan_text import table

        return table(self)

    def draw(self, path: str) -> None:
        """Draws address over stage to `path` (png, svg, pdf). Needs matplotlib: pip install 'fused-moe-ops[plot]'."""
        from moe_ops.plan_text import chart

        chart(self, path)


@lru_cache(maxsize=4096)
def plan_layer(layer: Layer) -> BufferPlan:
    """The plan of one forward."""
    resolved = layer.resolved()
    buffers, total = place(buffers_of(resolved))
    rule = AUTO_RULE if layer.layout == "auto" else "as asked"
    return BufferPlan(resolved, tuple(buffers), total, workspace_bytes(layer), rule)


def plan(
    *, T: int, E: int, K: int, I: int, top_k: int, recipe: str, layout: str = "auto", scale_format: str | None = None
) -> BufferPlan:
    """The buffer plan of one MoE forward.

    Args:
        T: tokens. E: experts on this rank. K: hidden size. I: intermediate size on this rank. top_k: routes a token.
        recipe: bf16, fp8_block, mxfp8 or mxfp4.
        layout: auto, contiguous or masked. auto is decided by T (rows.MASKED_TOKENS).
        scale_format: fp32 or ue8m0. None: the recipe's first.

    Raises:
        ValueError: a size is negative, or does not fit the recipe's groups.
    """
    op = "plan"
    row = get_recipe(op, recipe, scale_format)
    check.one_of(op, "layout", layout, LAYOUTS)
    for name, size, least in (("T", T, 0), ("E", E, 1), ("K", K, 1), ("I", I, 1), ("top_k", top_k, 1)):
        check.value(isinstance(size, int) and size >= least, op, name, f"an integer >= {least}", size, "Check it.")
    for name, size in (("K", K), ("I", I)):
        check.multiple(
            op, name, size, row.granule, f"Recipe {recipe} scales that many columns together; pad with zeros."
        )
    return plan_layer(Layer(T, top_k, E, K, I, recipe, scale_format or row.scale_formats[0], layout))
