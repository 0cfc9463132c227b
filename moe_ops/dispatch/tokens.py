"""TokenDispatcher: formats that hand over plain tokens with their routes, for pre_permute to sort and quantise."""

from dataclasses import dataclass

import torch
from torch import Tensor

from moe_ops import check
from moe_ops.dispatch.base import Dispatcher
from moe_ops.dispatch.experts import ExpertRows
from moe_ops.dispatch.setup import ExpertSetup
from moe_ops.dispatch.transport import Transport
from moe_ops.dispatch.wire import Wire
from moe_ops.rows import ceil_div


@dataclass(frozen=True)
class PlainTokens:
    """Tokens with their routes. Global ids; those of other ranks' experts are no route here."""

    hidden_states: Tensor
    """(N, K)."""
    topk_weights: Tensor
    topk_ids: Tensor


class TokenDispatcher(Dispatcher):
    """Weights and routed scaling multiply in post_permute: one sum a token and rank, rounded once.

    Args:
        layout: contiguous, masked, or auto: moe::fused_deepgemm's own choice, and contiguous stage by stage.
    """

    layouts = ("contiguous", "masked")
    payloads = ("bf16",)
    weights_applied_in = "post_permute"
    scaled_in = "post_permute"
    sums = "partial sums"

    def __init__(self, setup: ExpertSetup, transport: Transport, layout: str = "auto"):
        super().__init__(setup, transport)
        check.one_of(self.op, "layout", layout, ("auto", *self.layouts))
        Wire.of(self.op, setup, self.payloads)
        self.layout = layout

    def pre_permute(self, state: PlainTokens) -> ExpertRows:
        setup, here = self.setup, self.local_experts
        N = state.hidden_states.shape[0]
        masked = self.layout == "masked"
        sort = torch.ops.moe.pre_permute_masked if masked else torch.ops.moe.pre_permute_contiguous
        x, x_scale, row_map, src2dst = sort(
            state.hidden_states,
            state.topk_ids,
            num_local_experts=len(here),
            recipe=setup.recipe,
            scale_format=setup.scale_format,
            expert_start=here.start,
        )
        if not masked:
            return ExpertRows(x, x_scale, m_indices=row_map, src2dst=src2dst)
        hint = ceil_div(N * setup.top_k, setup.num_experts)
        return ExpertRows(x, x_scale, masked_m=row_map, expected_m=hint, src2dst=src2dst)

    def post_permute(self, down: Tensor, rows: ExpertRows, state: PlainTokens, w2_bias: Tensor | None = None) -> Tensor:
        return torch.ops.moe.post_permute(
            down,
            rows.src2dst,
            state.topk_weights,
            topk_ids=state.topk_ids,
            bias=w2_bias,
            expert_start=self.local_experts.start,
            routed_scaling_factor=self.setup.routed_scaling_factor,
            dtype=state.hidden_states.dtype,
        )
