"""MooncakeTransport and NixlTransport: deepep_ll over the buffers of two more libraries.

Their low-latency calls are deep_ep's in shapes, dtypes and limits, under other names. Like there, the application makes
the buffer, and nothing is imported here. Both carry slabs alone.
"""

from typing import Any

import torch
from torch import Tensor

from moe_ops import check
from moe_ops.dispatch.setup import ExpertSetup
from moe_ops.dispatch.transport import Batch, Counted, Expanded, Slabs, Slots
from moe_ops.dispatch.transport_deep_ep import check_low_latency, int64_ids, slab_rows
from moe_ops.dispatch.wire import Wire

MOST_TOP_K = 32
"""Routes of a token that Mooncake's kernels keep."""


class _SlabTransport:
    """Refuses every form but slabs, in words."""

    name: str

    def __init__(self, buffer: Any):
        self.buffer: Any = check.given(self.name, "buffer", buffer, "for this transport; make it with the library")
        self.rank, self.size = buffer.rank, buffer.group_size

    def check(self, op: str, setup: ExpertSetup) -> None:
        """Refuses what the low-latency kernels cannot carry.

        Raises:
            ValueError: more than 1024 tokens a rank; slabs whose scales TMA could not read; K that leaves scales over.
        """
        check_low_latency(op, setup, self.size)

    def _none(self, form: str) -> NotImplementedError:
        return NotImplementedError(f"{self.name}: form must be slabs; got {form}. Use deepep_ll, or another transport.")

    def send_slots(self, batch: Batch, setup: ExpertSetup) -> Slots:
        raise self._none("slots")

    def return_slots(self, sums: Tensor, handle: Any) -> Tensor:
        raise self._none("slots")

    def send_counted(self, batch: Batch, setup: ExpertSetup, wire: Wire) -> Counted:
        raise self._none("counted tokens")

    def return_counted(self, sums: Tensor, setup: ExpertSetup, handle: Any) -> Tensor:
        raise self._none("counted tokens")

    def send_expanded(self, batch: Batch, setup: ExpertSetup, wire: Wire) -> Expanded:
        raise self._none("expanded rows")

    def return_expanded(self, rows: Tensor, setup: ExpertSetup, handle: Any) -> Tensor:
        raise self._none("expanded rows")


class NixlTransport(_SlabTransport):
    """deepep_ll over NIXL.

    Args:
        buffer: nixl_ep.Buffer, after update_memory_buffers and connect_ranks.
    """

    name = "nixl"

    def send_slabs(self, batch: Batch, setup: ExpertSetup, wire: Wire) -> Slabs:
        fp8, ue8m0 = wire.payload == "fp8", wire.scale_format == "ue8m0"
        x, ids = batch.hidden_states.to(torch.bfloat16).contiguous(), int64_ids(batch, setup)
        rounded = dict(round_scale=fp8 and ue8m0, use_ue8m0=fp8 and ue8m0)
        got, count, handle, _, _ = self.buffer.dispatch(
            x, ids, setup.max_tokens, setup.num_experts, use_fp8=fp8, **rounded
        )
        return Slabs(*slab_rows(got, wire), count, handle)

    def return_slabs(self, down: Tensor, batch: Batch, setup: ExpertSetup, handle: Any) -> Tensor:
        weights = batch.topk_weights.float() * setup.routed_scaling_factor
        return self.buffer.combine(down, int64_ids(batch, setup), weights, handle)[0].to(batch.dtype)


class MooncakeTransport(_SlabTransport):
    """deepep_ll over Mooncake. Its kernels cast with float32 scales only: beside ue8m0 scales, pass payload="bf16".

    Args:
        buffer: mooncake.mooncake_ep_buffer.Buffer.
        timeout_us: how long a call waits for a peer, in microseconds. -1: for ever. A peer that is late is then left
            out of this call and of all later ones, and its routes are missing in the sums.

    active_ranks: (ranks,) int32 on the buffer's device, 1 for the peers that still count. None before the first call.
    Reading it is a host sync, so nothing here does: the application looks between its steps.
    """

    name = "mooncake"

    def __init__(self, buffer: Any, *, timeout_us: int = -1):
        super().__init__(buffer)
        fix = "It counts microseconds; -1 waits for ever."
        check.value(timeout_us == -1 or timeout_us > 0, self.name, "timeout_us", "positive or -1", timeout_us, fix)
        self.timeout_us = timeout_us
        self.active_ranks: Tensor | None = None

    def check(self, op: str, setup: ExpertSetup) -> None:
        """As for every low-latency transport, and no packed scales.

        Raises:
            ValueError: fp8 with ue8m0 scales; more than 32 routes a token.
        """
        super().check(op, setup)
        packed = setup.scale_format == "ue8m0" and setup.payload != "bf16"
        fix = "Mooncake's kernels cast with float32 scales alone."
        check.value(not packed, op, "payload", "bf16 beside ue8m0 scales", setup.payload, fix)
        check.value(
            setup.top_k <= MOST_TOP_K, op, "top_k", f"at most {MOST_TOP_K}", setup.top_k, "Its kernels end there."
        )

    def send_slabs(self, batch: Batch, setup: ExpertSetup, wire: Wire) -> Slabs:
        x, ids = batch.hidden_states.to(torch.bfloat16).contiguous(), int64_ids(batch, setup)
        if self.active_ranks is None:
            self.active_ranks = torch.ones(self.size, dtype=torch.int32, device=x.device)
        sizes = (setup.max_tokens, setup.num_experts, self.timeout_us)
        got, count, handle, _, _ = self.buffer.dispatch(
            x, ids, self.active_ranks, *sizes, use_fp8=wire.payload == "fp8"
        )
        if isinstance(got, tuple):  # its path without RDMA makes the scales row-major
            got = got[0], got[1].transpose(-1, -2).contiguous().transpose(-1, -2)
        return Slabs(*slab_rows(got, wire), count, handle)

    def return_slabs(self, down: Tensor, batch: Batch, setup: ExpertSetup, handle: Any) -> Tensor:
        weights = batch.topk_weights.float() * setup.routed_scaling_factor
        rest = (self.active_ranks, self.timeout_us, handle)
        return self.buffer.combine(down, int64_ids(batch, setup), weights, *rest)[0].to(batch.dtype)
