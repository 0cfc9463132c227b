"""Stands in for nixl_ep where there is no card: the calls of `Buffer` that NixlTransport makes, with their argument
order, shapes, dtypes and limits, over deep_ep's stand-in, whose kernels the library's are made from. The library learns
the number of ranks in update_memory_buffers and finds its peers in connect_ranks; here the group does for both.
"""

import torch.distributed as dist
from torch import Tensor

from moe_ops.csrc_stubs import deep_ep


class Buffer:
    """Low-latency only."""

    def __init__(self, rank: int = 0, group: dist.ProcessGroup | None = None):
        self.rank, self.group, self.group_size = rank, group, 0
        self._kernels: deep_ep.Buffer | None = None

    def update_memory_buffers(
        self, num_ranks: int, num_experts_per_rank: int, num_nvl_bytes: int = 0, num_rdma_bytes: int = 0
    ) -> None:
        self.group_size = num_ranks

    def connect_ranks(self, remote_ranks: list[int]) -> None:
        assert self.group is not None and len(remote_ranks) == self.group_size
        self._kernels = deep_ep.Buffer(self.group, low_latency_mode=True)

    def dispatch(
        self,
        x: Tensor,
        topk_idx: Tensor,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int,
        cumulative_local_expert_recv_stats: Tensor | None = None,
        dispatch_wait_recv_cost_stats: Tensor | None = None,
        use_fp8: bool = True,
        round_scale: bool = False,
        use_ue8m0: bool = False,
    ) -> tuple[deep_ep.Values, Tensor, tuple, None, None]:
        """As deep_ep.Buffer.low_latency_dispatch."""
        form = (use_fp8, round_scale, use_ue8m0)
        sizes = (num_max_dispatch_tokens_per_rank, num_experts)
        return self._connected.low_latency_dispatch(x, topk_idx, *sizes, *form)

    def combine(self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor, handle: tuple) -> tuple[Tensor, None, None]:
        """As deep_ep.Buffer.low_latency_combine."""
        return self._connected.low_latency_combine(x, topk_idx, topk_weights, handle)

    @property
    def _connected(self) -> deep_ep.Buffer:
        if self._kernels is None:
            raise AssertionError("nixl_ep: ranks are connected before the first call; got none")
        return self._kernels
