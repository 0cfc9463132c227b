"""deepep_ll: low latency. Tokens arrive as one slab an expert; GEMM2's rows go home as they are, weighted there."""

from dataclasses import dataclass

from torch import Tensor

from moe_ops.dispatch.base import Dispatcher
from moe_ops.dispatch.experts import ExpertRows, add_bias
from moe_ops.dispatch.setup import ExpertSetup
from moe_ops.dispatch.transport import Batch, Slabs, Transport
from moe_ops.dispatch.wire import Wire

GROUP = 128
"""Columns that share a scale on the way, whatever the recipe: the kernels that send quantise so."""


@dataclass(frozen=True)
class LowLatencyTokens:
    """Slabs that the masked GEMMs read as they are, and the tokens' own routes, which combine weighs."""

    slabs: Slabs
    batch: Batch


class DeepEPLowLatency(Dispatcher):
    """The form of Mooncake and NIXL too: their transports serve here as they are."""

    name = "deepep_ll"
    layouts = ("masked",)
    payloads = ("bf16", "fp8")
    weights_applied_in = "combine"
    scaled_in = "combine"
    sums = "rows"

    def __init__(self, setup: ExpertSetup, transport: Transport):
        super().__init__(setup, transport)
        transport.check(self.op, setup)
        self.wire = Wire.of(self.op, setup, self.payloads, GROUP)

    def dispatch(self, hidden_states: Tensor, topk_weights: Tensor, topk_ids: Tensor) -> LowLatencyTokens:
        batch = self._batch(hidden_states, topk_weights, topk_ids)
        return LowLatencyTokens(self.transport.send_slabs(batch, self.setup, self.wire), batch)

    def pre_permute(self, state: LowLatencyTokens) -> ExpertRows:
        slabs = state.slabs
        return ExpertRows(slabs.x, slabs.x_scale, masked_m=slabs.masked_m, expected_m=self.expected_m)

    def post_permute(
        self, down: Tensor, rows: ExpertRows, state: LowLatencyTokens, w2_bias: Tensor | None = None
    ) -> Tensor:
        return add_bias(down, rows, w2_bias)

    def combine(self, out: Tensor, state: LowLatencyTokens) -> Tensor:
        return self.transport.return_slabs(out, state.batch, self.setup, state.slabs.handle)
