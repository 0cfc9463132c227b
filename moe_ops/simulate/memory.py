"""Bytes that one rank holds for one layer. Buffers come from planner and contracts, never from a formula here."""

from dataclasses import dataclass
from typing import Any

import torch

from moe_ops.buffers import buffers_of
from moe_ops.choice import choose
from moe_ops.dispatch import Dispatcher
from moe_ops.dispatch.tokens import TokenDispatcher
from moe_ops.meta.grouped_gemm import weight_scale_spec
from moe_ops.planner import plan_layer
from moe_ops.recipes import get_recipe
from moe_ops.sizes import Layer
from moe_ops.spec import TensorSpec

ROWS = ("x_q", "x_scale", "gateup", "act_q", "act_scale", "down")
"""Buffers of a staged layer that exist too where its rows arrive sorted."""


@dataclass(frozen=True)
class Memory:
    """Of the fullest rank."""

    weights: int
    """Prepared experts, with scales."""
    experts: int
    """What the experts work in: the planned workspace, or rows and results of the stages, which live together."""
    exchange: int
    """What dispatch receives, what combine sends, and what it receives."""

    @property
    def total(self) -> int:
        return self.weights + self.experts + self.exchange


def weight_bytes(E: int, K: int, I: int, recipe: str, scale_format: str) -> int:
    """w13 (E, 2 I, K) and w2 (E, K, I)."""
    row = get_recipe("simulate", recipe, scale_format)
    specs = [weight_scale_spec(E, *shape, row, scale_format) for shape in ((2 * I, K), (K, I))]
    specs += [TensorSpec.contiguous(E, N, cols // row.w_pack, dtype=row.w_dtype) for N, cols in ((2 * I, K), (K, I))]
    return sum(spec.nbytes for spec in specs)


def layer_of(form: Dispatcher, I: int, tokens: int, rows: int) -> Layer:
    """The layer that the planner knows with the buffers of one rank.

    Args:
        tokens: that the rank works on, for formats that hand over plain tokens.
        rows: of a contiguous layout whose rows are counted on the host, a multiple of BLOCK.
    """
    setup, E = form.setup, len(form.local_experts)
    kind: dict[str, Any] = dict(recipe=setup.recipe, scale_format=setup.scale_format, num_experts=setup.num_experts)
    if isinstance(form, TokenDispatcher):
        return Layer(tokens, setup.top_k, E, setup.K, I, layout=form.layout, **kind)
    if form.needs_host_counts:  # as many rows as one expert with one route each
        return Layer(rows, 1, 1, setup.K, I, layout="contiguous", **kind)
    return Layer(form.slots, setup.top_k, E, setup.K, I, layout=form.layouts[0], **kind)


def experts_bytes(form: Dispatcher, layer: Layer, device: torch.device | str) -> tuple[int, str]:
    """(bytes, layout). device: where it runs, or a name in arch.ARCHS."""
    if isinstance(form, TokenDispatcher):
        plan = plan_layer(layer, choose("simulate", layer, "auto", device))
        return plan.total_bytes, plan.layer.layout
    return sum(buffer.spec.nbytes for buffer in buffers_of(layer) if buffer.name in ROWS), layer.layout
