"""The functional collectives of torch.distributed on one group: gloo on CPUs, NCCL on GPUs.

The ops that torch.compile knows (`_c10d_functional`), so that a graph may hold them; each is waited for at once.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

_OPS = torch.ops._c10d_functional


class Collectives:
    """A group of ranks. Every method is a collective: all ranks of the group call it, in the same order.

    Args:
        group: None: all ranks of the job.
    """

    def __init__(self, group: dist.ProcessGroup | None = None):
        if not dist.is_initialized():
            raise RuntimeError(
                "Collectives: torch.distributed must be initialised; got no process group. Call "
                "torch.distributed.init_process_group first, or start with torchrun."
            )
        group = dist.group.WORLD if group is None else group
        assert group is not None
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self.name = group.group_name

    @classmethod
    def alone(cls) -> "Collectives":
        """One rank by itself: every collective returns what it is given."""
        solo = cls.__new__(cls)
        solo.rank, solo.size, solo.name = 0, 1, ""
        return solo

    def all_gather(self, x: Tensor) -> Tensor:
        """(n, ...) -> (size * n, ...), by rank. n is the same on all ranks."""
        if self.size == 1:
            return x
        return _OPS.wait_tensor(_OPS.all_gather_into_tensor(x.contiguous(), self.size, self.name))

    def all_to_all(self, x: Tensor) -> Tensor:
        """(size, n, ...) -> (size, n, ...): row r goes to rank r; row r of the result came from rank r."""
        if self.size == 1:
            return x
        even = [1] * self.size
        return _OPS.wait_tensor(_OPS.all_to_all_single(x.contiguous(), even, even, self.name))

    def all_to_all_v(self, x: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        """(sum(send), ...) -> (sum(receive), ...): send[r] rows to rank r, receive[r] rows from it."""
        if self.size == 1:
            return x
        return _OPS.wait_tensor(_OPS.all_to_all_single(x.contiguous(), list(receive), list(send), self.name))

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over the ranks, in x's dtype, the same bits on all."""
        if self.size == 1:
            return x
        return _OPS.wait_tensor(_OPS.all_reduce(x.contiguous(), "sum", self.name))

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """(size * n, ...) -> (n, ...): this rank's part of the sum over the ranks, in x's dtype."""
        if self.size == 1:
            return x
        return _OPS.wait_tensor(_OPS.reduce_scatter_tensor(x.contiguous(), "sum", self.size, self.name))

    def all_gather_v(self, x: Tensor, rows: Sequence[int]) -> Tensor:
        """(rows[rank], ...) -> (sum(rows), ...), by rank."""
        if len(set(rows)) == 1:
            return self.all_gather(x)
        longest = max(rows)
        padded = self.all_gather(F.pad(x, (0, 0) * (x.dim() - 1) + (0, longest - x.shape[0])))
        parts = padded.unflatten(0, (self.size, longest))
        return torch.cat([part[:n] for part, n in zip(parts, rows, strict=True)])

    def reduce_scatter_v(self, x: Tensor, rows: Sequence[int]) -> Tensor:
        """(sum(rows), ...) -> (rows[rank], ...): as reduce_scatter, with a part of its own length for each rank.

        Parts travel in x's dtype and are added here, by rank, in float32 with one rounding.
        """
        if self.size == 1:
            return x
        own = rows[self.rank]
        parts = self.all_to_all_v(x, rows, [own] * self.size).view(self.size, own, *x.shape[1:])
        return parts.float().sum(0).to(x.dtype)
