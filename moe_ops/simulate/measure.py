"""What a real run moves, holds and takes: collectives that count their bytes, ops that are asked for their results.

Nothing here knows a format: bytes are read off the tensors that reach torch.distributed.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from moe_ops import dispatch
from moe_ops.dispatch import Experts, TorchTransport
from moe_ops.dispatch.collectives import Collectives
from moe_ops.dispatch.tokens import TokenDispatcher
from moe_ops.parallel import split_experts
from moe_ops.testing.dispatch_cases import DispatchCase
from moe_ops.testing.parallel_cases import ParallelCase


class Tally:
    """Bytes that one rank sent to each rank of the job, itself included."""

    def __init__(self, ranks: int):
        self.sent = [0.0] * ranks
        self.went_in = self.came_out = 0

    def note(self, to: Sequence[int], nbytes: Sequence[float], x: Tensor, out: Tensor) -> Tensor:
        for rank, n in zip(to, nbytes, strict=True):
            self.sent[rank] += n
        self.went_in += x.nbytes
        self.came_out += out.nbytes
        return out


class Counted(Collectives):
    """A group's collectives, counted. members: its ranks in the job."""

    def __init__(self, group: Collectives, members: Sequence[int], tally: Tally):
        self.rank, self.size, self.name = group.rank, group.size, group.name
        self.members, self.tally = members, tally

    def all_gather(self, x: Tensor) -> Tensor:
        return self.tally.note(self.members, [x.nbytes] * self.size, x, super().all_gather(x))

    def all_to_all(self, x: Tensor) -> Tensor:
        return self.tally.note(self.members, [x.nbytes / self.size] * self.size, x, super().all_to_all(x))

    def all_to_all_v(self, x: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        row = x.shape[1:].numel() * x.itemsize
        return self.tally.note(self.members, [n * row for n in send], x, super().all_to_all_v(x, send, receive))

    def all_reduce(self, x: Tensor) -> Tensor:
        return self.tally.note(self.members, [2 * x.nbytes / self.size] * self.size, x, super().all_reduce(x))

    def reduce_scatter(self, x: Tensor) -> Tensor:
        return self.tally.note(self.members, [x.nbytes / self.size] * self.size, x, super().reduce_scatter(x))


class _Results(TorchDispatchMode):
    """Bytes of the workspaces and of the results of this package's ops up to GEMM2."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        stage = func.namespace == "moe" and "post_permute" not in func.name()
        if stage or (func is torch.ops.aten.new_empty.default and out.dtype == torch.uint8):
            outs = out if isinstance(out, (tuple, list)) else (out,)
            self.nbytes += sum(t.untyped_storage().nbytes() for t in outs if isinstance(t, Tensor))
        return out


@dataclass(frozen=True)
class Measured:
    """Of one rank."""

    dispatch: list[float]
    """Bytes to each rank."""
    combine: list[float]
    exchange: int
    """Bytes that dispatch brought, that combine gave away and that it brought."""
    experts: int
    """Bytes of the workspace, or of the rows and the results of the stages."""
    weights: int
    dispatch_us: float
    combine_us: float
    out: Tensor


def run_measured(group: dist.ProcessGroup, case: DispatchCase, repeats: int = 0) -> Measured:
    """For RankPool.run: one rank of a case. Times are medians of `repeats` calls, 0 without any."""
    rank = dist.get_rank(group)
    inputs, weights = case.build()
    experts = Experts(split_experts(weights, rank, case.ranks))
    here = case.dispatcher(experts.weights, group)
    batch = case.own(inputs, rank)
    into, back = Tally(case.ranks), Tally(case.ranks)
    transport = here.transport
    assert isinstance(transport, TorchTransport)
    plain = transport.collectives
    transport.collectives = Counted(plain, range(case.ranks), into)
    state = here.dispatch(*batch)
    out, held = _experts(here, experts, state)
    transport.collectives = Counted(plain, range(case.ranks), back)
    result = here.combine(out, state)
    transport.collectives = plain
    there = _median(group, repeats, lambda: here.dispatch(*batch))
    home = _median(group, repeats, lambda: here.combine(out, state))
    tensors = (t for t in experts.weights.tensors().values() if t is not None)
    stored = sum(t.untyped_storage().nbytes() // case.ranks for t in tensors)  # views of all ranks' experts
    moved = into.came_out + back.went_in + back.came_out
    return Measured(into.sent, back.sent, moved, held, stored, there, home, result)


def _experts(here: dispatch.Dispatcher, experts: Experts, state) -> tuple[Tensor, int]:
    seen = _Results()
    if isinstance(here, TokenDispatcher):
        batch = (state.hidden_states, state.topk_weights, state.topk_ids)
        start, setup = here.local_experts.start, here.setup
        scaling = setup.routed_scaling_factor
        with seen:
            out = experts.on_tokens(
                *batch, expert_start=start, num_experts=setup.num_experts, routed_scaling_factor=scaling
            )
        return out, seen.nbytes
    rows = here.pre_permute(state)
    with seen:
        down = experts(rows)
    given = [t for t in (rows.x, rows.x_scale) if t is not None]
    return here.post_permute(down, rows, state), seen.nbytes + sum(t.untyped_storage().nbytes() for t in given)


def run_layer_bytes(group: dist.ProcessGroup, case: ParallelCase) -> list[float]:
    """For RankPool.run: the bytes that one rank of a whole layer sends to each rank."""
    layer = case.rank_layer(group)
    sizes, rank, tally = case.sizes, dist.get_rank(group), Tally(case.sizes.world)
    world, tp = range(sizes.world), sizes.attn_tp
    groups = layer.groups
    members = dict(world=world, tokens=world[rank % tp :: tp], attn_tp=world[rank // tp * tp :][:tp])
    counted = {name: Counted(getattr(groups, name), ranks, tally) for name, ranks in members.items()}
    for name, collectives in counted.items():
        object.__setattr__(groups, name, collectives)
    if isinstance(layer.dispatcher.transport, TorchTransport):
        layer.dispatcher.transport.collectives = counted["world"]
    layer(*case.own(group))
    return tally.sent


def run_links(group: dist.ProcessGroup, nbytes: int, repeats: int) -> float:
    """For RankPool.run: median microseconds of a plain all-to-all of so many bytes from each rank to each."""
    ranks = dist.get_world_size(group)
    sent = torch.zeros(ranks * nbytes, dtype=torch.uint8)
    received = torch.empty_like(sent)
    return _median(group, repeats, lambda: dist.all_to_all_single(received, sent, group=group))


def _median(group: dist.ProcessGroup, repeats: int, call: Callable[[], object]) -> float:
    """Microseconds of a call that all ranks make together."""
    times = []
    for _ in range(repeats):
        dist.barrier(group)
        start = time.perf_counter()
        call()
        times.append(1e6 * (time.perf_counter() - start))
    return statistics.median(times) if times else 0.0
