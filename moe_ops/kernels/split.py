"""Products of few tiles and a long K, divided along K: partial sums in memory of their own, added up in order.

No atomics, so the same inputs give the same bits on every run.
"""

import torch
from torch import Tensor

_PROGRAMS = 256
"""About two on each multiprocessor of the cards this is for (78 to 188 have been sold). Not tuned on cards."""
_STEPS = 8
"""Steps along K below which a range is not worth its own program."""


def choose_splits(programs: int, steps: int) -> int:
    """Into how many ranges a product of so many tiles and of so many steps along K is divided."""
    return max(1, min(_PROGRAMS // max(1, programs), steps // _STEPS))


def partial(out: Tensor, splits: int) -> Tensor:
    """Where the ranges write: (splits, *out.shape)."""
    return out[None] if splits == 1 else out.new_empty((splits, *out.shape))


def add_up(partials: Tensor, out: Tensor) -> None:
    """The sum over the ranges, into out."""
    if len(partials) > 1:
        torch.sum(partials, 0, out=out)
