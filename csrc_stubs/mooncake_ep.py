"""Stands in for mooncake.mooncake_ep_buffer where there is no card: the calls of `Buffer` that MooncakeTransport makes,
with their argument order, shapes, dtypes and limits, over deep_ep's stand-in. Scales are row-major, as in the library's
path without RDMA.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from moe_ops.csrc_stubs import deep_ep

MOST_TOP_K = 32


class Buffer:
    """Low-latency only."""

    def __init__(self, group: dist.ProcessGroup, num_ep_buffer_bytes: int = 0):
        self.rank, self.group_size, self.group = dist.get_rank(group), dist.get_world_size(group), group
        self._kernels = deep_ep.Buffer(group, low_latency_mode=True)

    def dispatch(
        self,
        x: Tensor,
        topk_idx: Tensor,
        active_ranks: Tensor,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int,
        timeout_us: int,
        use_fp8: bool = True,
    ) -> tuple[deep_ep.Values, Tensor, tuple, None, None]:
        """(recv_x (E, ranks * max, hidden) bf16, or e4m3 with float32 scales; recv_count; handle; event; hook)."""
        self._check(topk_idx, active_ranks, timeout_us)
        most = num_max_dispatch_tokens_per_rank
        if use_fp8:
            _need(self.group_size * most % 4 == 0, "the tokens of all ranks are a multiple of 4", most)
        got, count, handle, _, _ = self._kernels.low_latency_dispatch(x, topk_idx, most, num_experts, use_fp8)
        if isinstance(got, tuple):
            got = got[0], got[1].contiguous()
        return got, count, handle, None, None

    def combine(
        self,
        x: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor,
        active_ranks: Tensor,
        timeout_us: int,
        handle: tuple,
    ) -> tuple[Tensor, None, None]:
        """(num_tokens, hidden) bf16: the sum of topk_weights * the routes' rows."""
        self._check(topk_idx, active_ranks, timeout_us)
        return self._kernels.low_latency_combine(x, topk_idx, topk_weights, handle)

    def _check(self, topk_idx: Tensor, active_ranks: Tensor, timeout_us: int) -> None:
        want = (self.group_size,)
        fits = active_ranks.dtype == torch.int32 and active_ranks.shape == want
        _need(fits, f"active_ranks is {want} int32", (active_ranks.shape, active_ranks.dtype))
        _need(timeout_us == -1 or timeout_us > 0, "timeout_us is positive or -1", timeout_us)
        _need(topk_idx.shape[1] <= MOST_TOP_K, f"top_k <= {MOST_TOP_K}", topk_idx.shape)


def _need(ok: bool, rule: str, got: object) -> None:
    if not ok:
        raise AssertionError(f"mooncake: {rule}; got {got}")
