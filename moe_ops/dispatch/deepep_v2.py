"""deepep_v2: three variants. Expanded: a row for each token and expert, sorted, weighted before it goes home; its rows
feed the contiguous GEMMs as they are, or through slabs the masked ones. Not expanded: as deepep_normal."""

from torch import Tensor

from moe_ops.dispatch.base import Dispatcher
from moe_ops.dispatch.deepep_normal import DeepEPNormal
from moe_ops.dispatch.experts import ExpertRows, add_bias, pack_rows
from moe_ops.dispatch.scatter import expand_to_slab, m_indices_from_psum, slab_to_expand, weigh
from moe_ops.dispatch.setup import ExpertSetup
from moe_ops.dispatch.transport import Expanded, Transport
from moe_ops.dispatch.wire import Wire
from moe_ops.rows import BLOCK, align


class DeepEPV2(DeepEPNormal):
    """Not expanded, for prefill. The scales that travel are the recipe's own."""

    name = "deepep_v2"
    group = 0


class DeepEPV2Expanded(Dispatcher):
    """Expanded, contiguous. Weights multiply in float32 with one rounding; combine only adds."""

    name = "deepep_v2_expanded"
    layouts = ("contiguous",)
    payloads = ("bf16", "fp8")
    weights_applied_in = "post_permute"
    scaled_in = "combine"
    sums = "weighted rows"

    def __init__(self, setup: ExpertSetup, transport: Transport):
        super().__init__(setup, transport)
        self.wire = Wire.of(self.op, setup, self.payloads)

    def dispatch(self, hidden_states: Tensor, topk_weights: Tensor, topk_ids: Tensor) -> Expanded:
        return self.transport.send_expanded(self._batch(hidden_states, topk_weights, topk_ids), self.setup, self.wire)

    def pre_permute(self, state: Expanded) -> ExpertRows:
        x, x_scale = pack_rows(state.tokens)
        return ExpertRows(x, x_scale, m_indices=m_indices_from_psum(state.psum, x.shape[0]))

    def post_permute(self, down: Tensor, rows: ExpertRows, state: Expanded, w2_bias: Tensor | None = None) -> Tensor:
        return weigh(add_bias(down, rows, w2_bias), state.route_weights)

    def combine(self, out: Tensor, state: Expanded) -> Tensor:
        return self.transport.return_expanded(out, self.setup, state.handle)


class DeepEPV2Masked(DeepEPV2Expanded):
    """Expanded, through slabs, for decode: as many rows a slab as all ranks may bring tokens."""

    name = "deepep_v2_masked"
    layouts = ("masked",)

    def pre_permute(self, state: Expanded) -> ExpertRows:
        assert self.setup.max_tokens is not None
        slabs, masked_m = expand_to_slab(
            state.tokens, state.psum, align(self.transport.size * self.setup.max_tokens, BLOCK)
        )
        x, x_scale = pack_rows(slabs)
        return ExpertRows(x, x_scale, masked_m=masked_m, expected_m=self.expected_m)

    def post_permute(self, down: Tensor, rows: ExpertRows, state: Expanded, w2_bias: Tensor | None = None) -> Tensor:
        slabs = add_bias(down, rows, w2_bias)
        return weigh(slab_to_expand(slabs, state.psum, state.tokens.x.shape[0]), state.route_weights)
