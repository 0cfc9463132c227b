"""DeepEPTransport: the forms of transport.py over the deep_ep library's buffers.

The buffers are made by the application, which knows their sizes; nothing is imported here.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moe_ops import check
from moe_ops.dispatch.experts import pack_rows
from moe_ops.dispatch.setup import ExpertSetup
from moe_ops.dispatch.transport import Batch, Counted, Expanded, Slabs, Slots
from moe_ops.dispatch.wire import Tokens, Wire, as_bytes
from moe_ops.rows import BLOCK, align

MOST_TOKENS = 1024
"""Tokens that one rank may send to another in a low-latency dispatch: the kernels' counters end there."""
_OP = "deep_ep"
_NO_SLOTS = f"{_OP}: form must be slabs, counted or expanded tokens; got slots. Use TorchTransport for flashinfer."


class DeepEPTransport:
    """Carries slabs over `buffer`; counted tokens over `elastic` where it is given, else over `buffer`; expanded rows
    over `elastic`.

    Args:
        group: the buffers' group.
        buffer: deep_ep.Buffer, in low-latency mode for deepep_ll.
        elastic: deep_ep.ElasticBuffer.
    """

    def __init__(self, group: dist.ProcessGroup, *, buffer: Any = None, elastic: Any = None):
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.buffer, self.elastic = buffer, elastic

    def check(self, op: str, setup: ExpertSetup) -> None:
        """Refuses what the low-latency kernels cannot carry.

        Raises:
            ValueError: more than MOST_TOKENS a rank; slabs whose scales TMA could not read; K that leaves scales over.
        """
        check_low_latency(op, setup, self.size)

    def send_slots(self, batch: Batch, setup: ExpertSetup) -> Slots:
        raise NotImplementedError(_NO_SLOTS)

    def return_slots(self, sums: Tensor, handle: Any) -> Tensor:
        raise NotImplementedError(_NO_SLOTS)

    def send_slabs(self, batch: Batch, setup: ExpertSetup, wire: Wire) -> Slabs:
        fp8, ue8m0 = wire.payload == "fp8", wire.scale_format == "ue8m0"
        received, count, handle, _, _ = _given(self.buffer, "buffer").low_latency_dispatch(
            batch.hidden_states.to(torch.bfloat16),
            int64_ids(batch, setup),
            setup.max_tokens,
            setup.num_experts,
            use_fp8=fp8,
            round_scale=fp8 and ue8m0,
            use_ue8m0=fp8 and ue8m0,
        )
        return Slabs(*slab_rows(received, wire), count, handle)

    def return_slabs(self, down: Tensor, batch: Batch, setup: ExpertSetup, handle: Any) -> Tensor:
        weights = batch.topk_weights.float() * setup.routed_scaling_factor  # so that the sum is rounded once
        out, _, _ = self.buffer.low_latency_combine(down, int64_ids(batch, setup), weights, handle)
        return out.to(batch.dtype)

    def send_counted(self, batch: Batch, setup: ExpertSetup, wire: Wire) -> Counted:
        ids, weights, x = int64_ids(batch, setup), batch.topk_weights.float().contiguous(), _values(batch, wire)
        if self.elastic is not None:
            received, ids, weights, handle, _ = self.elastic.dispatch(
                x, ids, weights, num_experts=setup.num_experts, expert_alignment=BLOCK
            )
            rows = [align(n, BLOCK) for n in handle.num_recv_tokens_per_expert_list]
        else:
            buffer = _given(self.buffer, "buffer")
            fix = "Pass an ElasticBuffer, or payload='bf16'."
            fits = wire.payload == "bf16" or wire.group == 128
            check.value(fits, _OP, "the columns that share a scale", "128 for Buffer.dispatch", wire.group, fix)
            per_rank, per_rdma_rank, per_expert, in_rank, _ = buffer.get_dispatch_layout(ids, setup.num_experts)
            received, ids, weights, rows, handle, _ = buffer.dispatch(
                x,
                num_tokens_per_rank=per_rank,
                num_tokens_per_rdma_rank=per_rdma_rank,
                is_token_in_rank=in_rank,
                num_tokens_per_expert=per_expert,
                topk_idx=ids,
                topk_weights=weights,
                expert_alignment=BLOCK,
            )
        return Counted(_tokens(received, wire), weights, ids.int(), rows, (handle, batch.dtype))

    def return_counted(self, sums: Tensor, setup: ExpertSetup, handle: Any) -> Tensor:
        buffer = self.buffer if self.elastic is None else self.elastic
        return _scaled(buffer.combine(sums, handle[0])[0], setup, handle[1])

    def send_expanded(self, batch: Batch, setup: ExpertSetup, wire: Wire) -> Expanded:
        received, _, weights, handle, _ = _given(self.elastic, "elastic").dispatch(
            _values(batch, wire),
            int64_ids(batch, setup),
            batch.topk_weights.float().contiguous(),
            num_experts=setup.num_experts,
            num_max_tokens_per_rank=setup.max_tokens,
            expert_alignment=BLOCK,
            do_cpu_sync=False,
            do_expand=True,
        )
        psum = handle.psum_num_recv_tokens_per_expert.long()
        return Expanded(_tokens(received, wire), psum, weights, (handle, batch.dtype))

    def return_expanded(self, rows: Tensor, setup: ExpertSetup, handle: Any) -> Tensor:
        return _scaled(self.elastic.combine(rows, handle[0])[0], setup, handle[1])


def check_low_latency(op: str, setup: ExpertSetup, ranks: int) -> None:
    """See DeepEPTransport.check; the limits of every library with these kernels."""
    assert setup.max_tokens is not None
    fix = "The low-latency kernels count no further. Take deepep_normal for larger batches."
    check.value(setup.max_tokens <= MOST_TOKENS, op, "max_tokens", f"at most {MOST_TOKENS}", setup.max_tokens, fix)
    check.multiple(op, "ranks * max_tokens", ranks * setup.max_tokens, 4, "Round max_tokens up.")
    packed = setup.scale_format == "ue8m0" and setup.payload != "bf16"
    fix = "Scales fill whole words there: pad K, or pass payload='bf16'."
    check.multiple(op, "K", setup.K, 512 if packed else 128, fix)


def _given(buffer: Any, name: str) -> Any:
    return check.given(_OP, name, buffer, "for this format; make it with the deep_ep library")


def int64_ids(batch: Batch, setup: ExpertSetup) -> Tensor:
    """int64, -1 for every id that is no expert: the kernels look at nothing else."""
    ids = batch.topk_ids.long()
    return torch.where((ids >= 0) & (ids < setup.num_experts), ids, -1)


def _values(batch: Batch, wire: Wire) -> Any:
    """bf16 values, or e4m3 values with one float32 scale for every wire.group columns."""
    if wire.payload == "bf16":
        return batch.hidden_states.to(torch.bfloat16).contiguous()
    tokens = wire.quantised(batch.hidden_states)
    assert tokens.scale is not None
    exponents = tokens.scale.dtype == torch.uint8
    scale = (tokens.scale.int() << 23).view(torch.float32) if exponents else tokens.scale
    return tokens.x, scale.clone(memory_format=torch.contiguous_format)


def _tokens(received: Any, wire: Wire) -> Tokens:
    """Undoes _values."""
    if wire.payload == "bf16":
        return wire.tokens(received)
    x, scale = received
    return wire.received(x, (scale.view(torch.int32) >> 23).to(torch.uint8) if wire.scale_format == "ue8m0" else scale)


def slab_rows(received: Any, wire: Wire) -> tuple[Tensor, Tensor | None]:
    """(x, x_scale) as the masked GEMMs read them, which is the library's form where the groups are the recipe's."""
    if wire.payload == "bf16":
        if not wire.recipe.quantised:
            return received, None
        return torch.ops.moe.quantize(received, group=wire.recipe.x_group, scale_format=wire.scale_format)
    x, scale = received
    if wire.group == wire.recipe.x_group:
        return x, scale
    exponents = as_bytes(scale)[..., : wire.K // wire.group]
    return pack_rows(wire.received(x, exponents))


def _scaled(out: Tensor, setup: ExpertSetup, dtype: torch.dtype) -> Tensor:
    """The library's bf16 sum times routed_scaling_factor: rounded once more unless that is a power of two."""
    return (out.float() * setup.routed_scaling_factor).to(dtype)
