"""Wrong layers over two ranks, each with the sentence that should refuse it before any collective."""

from collections.abc import Callable

import torch
import torch.distributed as dist

from moe_ops.dispatch import Overlap
from moe_ops.parallel import ParallelGroups, ParallelMoE, ParallelSizes
from moe_ops.testing.parallel_cases import ParallelCase

_DP = ParallelSizes(attn_dp=2, moe_tp=2)
_EP = ParallelSizes(attn_dp=2, ep=2)


def refusals(group: dist.ProcessGroup) -> list[tuple[str, str, str, str]]:
    """(name, type of the error, its sentence, pattern that it should match) of each."""

    def layer(sizes: ParallelSizes = _DP, dispatch: str = "standard", **more) -> ParallelMoE:
        return ParallelCase(sizes, dispatch, (3, 3), **more).rank_layer(group)

    def call(T: int = 3, tokens=None, **more) -> torch.Tensor:
        ids = torch.zeros(T, dtype=torch.int64)
        return layer(**more)(torch.zeros(T, 256, dtype=torch.bfloat16), ids, tokens=tokens)

    rank = dist.get_rank(group)
    cases: list[tuple[str, Callable, str]] = [
        (
            "sizes of other ranks",
            lambda: ParallelGroups.of(ParallelSizes(attn_dp=4, ep=4), group),
            "group must be of 4 ranks; got 2",
        ),
        ("shared", lambda: layer(shared="half"), "shared must be one of replicated, sharded; got 'half'"),
        (
            "sharded beside an all-to-all",
            lambda: layer(_EP, "deepep_ll", shared="sharded"),
            "shared must be replicated beside",
        ),
        ("no capacity for a gather", lambda: layer(max_tokens=None), "max_tokens must be given to a gather; got None"),
        (
            "no capacity for slots",
            lambda: layer(_EP, "deepep_ll", max_tokens=None),
            "dispatch deepep_ll: max_tokens must be given",
        ),
        (
            "host counts, captured",
            lambda: ParallelCase(_EP, "deepep_normal", (3, 3)).rank_layer(group, captured=True),
            "one without host counts",
        ),
        (
            "counts, captured",
            lambda: ParallelCase(_DP, "standard", (3, 3), uneven=True).rank_layer(group, captured=True),
            "uneven must be False for what is captured; got True",
        ),
        (
            "split experts' size beside an all-to-all",
            lambda: layer(_DP, "deepep_ll"),
            "moe_tp must be 1 beside an all-to-all; got 2",
        ),
        ("too many tokens", lambda: call(T=10), "hidden_states must be of at most max_tokens=9 tokens; got 10"),
        (
            "counts for slots",
            lambda: call(tokens=[3, 3]),
            "tokens must be given to an uneven layer that gathers, and to no other",
        ),
        (
            "overlap without a journey",
            lambda: ParallelCase(_DP, "standard", (3, 3)).rank_layer(group, overlap=Overlap()),
            "overlap must be None beside local experts",
        ),
        ("no counts", lambda: call(uneven=True), "tokens must be given to an uneven layer"),
        (
            "others' counts",
            lambda: call(uneven=True, tokens=[4, 4]),
            f"tokens must be 2 counts, 3 at place {rank}; got",
        ),
        ("too few counts", lambda: call(uneven=True, tokens=[3]), f"tokens must be 2 counts, 3 at place {rank}; got"),
    ]
    rows = []
    for name, wrong, pattern in cases:
        try:
            wrong()
            rows.append((name, "nothing", "it was accepted", pattern))
        except Exception as error:
            rows.append((name, type(error).__name__, str(error), pattern))
    return rows
