"""deepep_normal: high throughput. A token goes once to each rank that has an expert for it, and one sum comes back."""

import torch
from torch import Tensor

from moe_ops.dispatch.base import Dispatcher
from moe_ops.dispatch.deepep_ll import GROUP
from moe_ops.dispatch.experts import ExpertRows, pack_rows
from moe_ops.dispatch.scatter import m_indices_from_psum, number_routes, scatter_tokens
from moe_ops.dispatch.setup import ExpertSetup
from moe_ops.dispatch.transport import Counted, Transport
from moe_ops.dispatch.wire import Wire


class DeepEPNormal(Dispatcher):
    """The row count is exact, not the worst case: rows_per_expert is known on the host."""

    name = "deepep_normal"
    layouts = ("contiguous",)
    payloads = ("bf16", "fp8")
    weights_applied_in = "post_permute"
    scaled_in = "combine"
    sums = "partial sums"
    needs_host_counts = True
    needs_capacity = False
    group = GROUP
    """Columns that share a scale on the way; 0: the recipe's own."""

    def __init__(self, setup: ExpertSetup, transport: Transport):
        super().__init__(setup, transport)
        self.wire = Wire.of(self.op, setup, self.payloads, self.group)

    def dispatch(self, hidden_states: Tensor, topk_weights: Tensor, topk_ids: Tensor) -> Counted:
        return self.transport.send_counted(self._batch(hidden_states, topk_weights, topk_ids), self.setup, self.wire)

    def pre_permute(self, state: Counted) -> ExpertRows:
        M = sum(state.rows_per_expert)
        routes = number_routes(state.topk_ids, len(self.local_experts))
        src2dst = routes.in_blocks()
        x, x_scale = pack_rows(scatter_tokens(state.tokens, src2dst, M))
        return ExpertRows(x, x_scale, m_indices=m_indices_from_psum(routes.psum, M), src2dst=src2dst)

    def post_permute(self, down: Tensor, rows: ExpertRows, state: Counted, w2_bias: Tensor | None = None) -> Tensor:
        return torch.ops.moe.post_permute(
            down, rows.src2dst, state.topk_weights, topk_ids=state.topk_ids, bias=w2_bias, dtype=torch.bfloat16
        )

    def combine(self, out: Tensor, state: Counted) -> Tensor:
        return self.transport.return_counted(out, self.setup, state.handle)
