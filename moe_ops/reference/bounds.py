"""Refusals of row maps that point outside: read as they are, they would wrap around or reach into another expert.

Only the reference looks at these values; a GPU kernel cannot without a host sync.
"""

import torch


def check_counts(op: str, masked_m: torch.Tensor, m_max: int) -> None:
    """ValueError unless 0 <= masked_m[e] <= m_max."""
    wrong = (masked_m < 0) | (masked_m > m_max)
    if wrong.any():
        expert = int(wrong.nonzero()[0])
        raise ValueError(
            f"{op}: masked_m must be between 0 and m_max={m_max}; got {int(masked_m[expert])} for expert {expert}. "
            "Pass pre_permute's result."
        )


def check_below(op: str, name: str, index: torch.Tensor, end: int, what: str) -> None:
    """ValueError if an index reaches `end` or beyond; negative ones mean none."""
    wrong = index >= end
    if wrong.any():
        where = tuple(int(i) for i in wrong.nonzero()[0])
        raise ValueError(
            f"{op}: {name} must be below {end}, the {what}; got {int(index[where])} at {where}. "
            "Pass pre_permute's result."
        )
