"""The buffer plan: contracts + stage order -> lifetimes -> offsets in one workspace.

Lifetimes of the forward form a chain: each stage reads what the stage before wrote and writes what the next one reads.
So buffers take turns at the two ends of the arena (even stages at the bottom, odd ones at the top), those that live
longer than one hand-over stand below all of them, and what a stage needs for itself alone lies where the next one will
write. No two that live together overlap when the arena is as long as the fullest stage, and no arena can be shorter:
the plan is optimal by construction, needs no search, and the same code gives the size of a traced token count. (In the
gathered layout the activation outlives a hand-over, so it does not lie where the routing's scratch was: kilobytes.)
(Placing greedily by size is not optimal here: bf16 with K > 2 I takes a fifth more.)
"""

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch

from moe_ops import check
from moe_ops.arch import here
from moe_ops.buffers import STAGES, Buffer, buffers_of, largest_buffers_of
from moe_ops.choice import ANY, Choice, choose, token_bounds
from moe_ops.recipes import get_recipe
from moe_ops.rows import LAYOUTS, ceil_div
from moe_ops.sizes import Layer

_MANY = 1 << 31
"""More tokens than a call has."""


def workspace_bytes(layer: Layer, backend: str = "auto", device: torch.device | str | None = None) -> Any:
    """Bytes that are enough for every token count up to T, by this backend, on this device or, None, on any.
    SymInt-safe.

    `auto` counts each layout that choice.py may take, for the tokens for which it may.
    """
    if layer.layout != "auto":
        return _extent(largest_buffers_of(layer))
    needed = 0
    for layout, (least, most) in token_bounds(layer, backend, device).items():
        tokens = layer.T if most == ANY else torch.sym_min(layer.T, int(most))
        if least > 1:  # below, none: without a comparison, which would be a guard
            tokens = torch.sym_min(tokens, torch.sym_max(layer.T - least + 1, 0) * _MANY)
        needed = torch.sym_max(needed, _extent(largest_buffers_of(layer.with_layout(layout, tokens))))
    return torch.sym_max(needed, workspace_bytes(layer.as_fp8(), backend, device)) if layer.has_fp8 else needed


def place(buffers: list[Buffer]) -> tuple[list[Buffer], int]:
    """Gives each buffer its offset; returns them with the length of the arena."""
    total = _extent(buffers)
    placed, bottom = [], 0
    for buffer in filter(_stands, buffers):
        placed.append(buffer.at(bottom))
        bottom += buffer.nbytes
    before = 0  # bytes of the stage before, at the other end
    for stage in range(len(STAGES)):
        taken = {True: 0, False: before}  # at this stage's own end, and at the other one
        for buffer in buffers:
            if buffer.first != stage or _stands(buffer):
                continue
            own = buffer.last > stage  # what dies with its stage gives way to the next one
            at_bottom = own == (stage % 2 == 0)
            offset = bottom + taken[own] if at_bottom else total - taken[own] - buffer.nbytes
            placed.append(buffer.at(offset))
            taken[own] += buffer.nbytes
        before = taken[True]
    return placed, total


def _stands(buffer: Buffer) -> bool:
    return buffer.last > buffer.first + 1


def _extent(buffers: list[Buffer]) -> Any:
    """Bytes of the standing buffers and of the fullest stage: an int, or a SymInt while traced."""
    standing = sum(buffer.nbytes for buffer in buffers if _stands(buffer))
    fullest, before = 0, 0
    for stage in range(len(STAGES)):
        mine = [buffer for buffer in buffers if buffer.first == stage and not _stands(buffer)]
        fullest = torch.sym_max(fullest, before + sum(buffer.nbytes for buffer in mine))
        before = sum(buffer.nbytes for buffer in mine if buffer.last > stage)
    return standing + fullest


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
    chunks: tuple[int, ...] = ()
    """Tokens of the parts that a call with max_workspace_bytes runs in, one after another; the plan is the largest
    one's. Empty: no budget was given."""

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


def resolve(layer: Layer, choice: Choice) -> Layer:
    """The layer as it is computed."""
    return (layer.as_fp8() if choice.fp8 else layer).with_layout(choice.layout)


@lru_cache(maxsize=4096)
def plan_layer(layer: Layer, choice: Choice | None = None) -> BufferPlan:
    """The plan of one forward in the layout that was chosen, or in the layer's own."""
    resolved = layer if choice is None else resolve(layer, choice)
    buffers, total = place(buffers_of(resolved))
    rule = "as asked" if layer.layout != "auto" else f"auto: {choice}"
    return BufferPlan(resolved, tuple(buffers), total, workspace_bytes(layer), rule)


@lru_cache(maxsize=4096)
def split(layer: Layer, choice: Choice, budget: int) -> tuple[int, ...]:
    """Tokens of the parts, as even as can be, in which the layer runs in `budget` bytes of workspace.

    Layout, backend and tiles are those of the whole. Only the layer's T is split, never a token's routes.

    Raises:
        ValueError: not even one token fits.
    """

    def needed(tokens: int) -> int:
        return plan_layer(replace(layer, T=tokens, of=layer.T), choice).total_bytes

    if layer.T == 0 or needed(layer.T) <= budget:
        return (layer.T,)
    least = needed(1)
    fix = f"Pass at least {least}."
    check.value(least <= budget, "plan", "max_workspace_bytes", "enough for one token", budget, fix)
    fits, beyond = 1, layer.T  # more tokens never take fewer bytes
    while beyond - fits > 1:
        middle = (fits + beyond) // 2
        fits, beyond = (middle, beyond) if needed(middle) <= budget else (fits, middle)
    parts = ceil_div(layer.T, fits)
    return tuple(layer.T * (part + 1) // parts - layer.T * part // parts for part in range(parts))


def plan_chunks(layer: Layer, choice: Choice, budget: int) -> BufferPlan:
    """The plan of the largest part of a call that is split to fit `budget` bytes."""
    chunks = split(layer, choice, budget)
    plan = plan_layer(replace(layer, T=max(chunks), of=layer.T), choice)
    return replace(plan, workspace_bytes=min(plan.workspace_bytes, budget), chunks=chunks)


def plan(
    *,
    T: int,
    E: int,
    K: int,
    I: int,
    top_k: int,
    recipe: str,
    layout: str = "auto",
    scale_format: str | None = None,
    num_experts: int = -1,
    backend: str = "auto",
    arch: str | None = None,
    max_workspace_bytes: int | None = None,
) -> BufferPlan:
    """The buffer plan of one MoE forward.

    Args:
        T: tokens. E: experts on this rank. K: hidden size. I: intermediate size on this rank. top_k: routes a token.
        recipe: bf16, fp8_block, mxfp8 or mxfp4.
        layout: auto, contiguous, masked, gathered or direct. auto is decided by the table in choice.py.
        scale_format: fp32 or ue8m0. None: the recipe's first.
        num_experts: of all ranks together; -1: E.
        backend: as in fused_deepgemm.
        arch: cpu, sm90, sm100 or sm120: the plan there, with deep_gemm installed. None: here.
        max_workspace_bytes: as in fused_deepgemm. The plan is then that of the largest part; plan.chunks has them all.

    Raises:
        ValueError: a size is negative, or does not fit the recipe's groups; num_experts is below E;
            max_workspace_bytes holds no token.
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
    fix = "It counts the experts of all ranks."
    check.value(num_experts == -1 or num_experts >= E, op, "num_experts", f"at least E = {E}, or -1", num_experts, fix)
    layer = Layer(T, top_k, E, K, I, recipe, scale_format or row.scale_formats[0], layout, num_experts)
    choice = choose(op, layer, backend, arch or here())
    return plan_layer(layer, choice) if max_workspace_bytes is None else plan_chunks(layer, choice, max_workspace_bytes)
