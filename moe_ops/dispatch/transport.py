"""Transport: what moves tokens between the ranks of an expert-parallel group, and what arrives.

A format says in which form its experts get the tokens; a transport knows how to bring them into it. Four pairs of
calls, one for each form; `handle` is the transport's own and goes back to it untouched. Ranks call in step, also those
without a token.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from moe_ops.dispatch.setup import ExpertSetup
from moe_ops.dispatch.wire import Tokens, Wire


@dataclass(frozen=True)
class Batch:
    """One rank's own tokens, as every way in gets them."""

    hidden_states: Tensor
    """(T, K) float."""
    topk_weights: Tensor
    """(T, top_k) float."""
    topk_ids: Tensor
    """(T, top_k) int, global; others than [0, num_experts), -1 among them, are no route."""

    @property
    def dtype(self) -> torch.dtype:
        return self.hidden_states.dtype


@dataclass(frozen=True)
class Slots:
    """Plain tokens, one slot for each token that any rank may bring: N = ranks * max_tokens."""

    hidden_states: Tensor
    """(N, K) bf16."""
    topk_weights: Tensor
    """(N, top_k) float32."""
    topk_ids: Tensor
    """(N, top_k) int32, global, -1 where the expert is elsewhere or the slot is empty."""
    handle: Any


@dataclass(frozen=True)
class Slabs:
    """One slab of rows for each local expert."""

    x: Tensor
    """(E, m_max, K) in the recipe's activation dtype."""
    x_scale: Tensor | None
    """As grouped_gemm_masked reads it."""
    masked_m: Tensor
    """(E,) int32."""
    handle: Any


@dataclass(frozen=True)
class Counted:
    """Exactly the tokens that have an expert here, and on the host how many rows each expert gets."""

    tokens: Tokens
    topk_weights: Tensor
    """(N, top_k) float32."""
    topk_ids: Tensor
    """(N, top_k) int32, local, -1 elsewhere."""
    rows_per_expert: list[int]
    """Aligned to whole blocks."""
    handle: Any


@dataclass(frozen=True)
class Expanded:
    """One row for each token and expert, sorted: expert e has rows [align(psum[e - 1]), psum[e])."""

    tokens: Tokens
    """M rows."""
    psum: Tensor
    """(E,) int64."""
    route_weights: Tensor
    """(M,) float32."""
    handle: Any


class Transport(Protocol):
    """One rank's end. Raises NotImplementedError in words for a form that it does not carry."""

    rank: int
    size: int

    def check(self, op: str, setup: ExpertSetup) -> None:
        """Refuses sizes that this transport cannot carry in a low-latency format."""
        ...

    def send_slots(self, batch: Batch, setup: ExpertSetup) -> Slots: ...

    def return_slots(self, sums: Tensor, handle: Any) -> Tensor:
        """(N, K) bf16, one sum a slot -> (T, K) in the batch's dtype: added over the ranks."""
        ...

    def send_slabs(self, batch: Batch, setup: ExpertSetup, wire: Wire) -> Slabs: ...

    def return_slabs(self, down: Tensor, batch: Batch, setup: ExpertSetup, handle: Any) -> Tensor:
        """(E, m_max, K) bf16 -> (T, K): routed_scaling_factor * sum of topk_weights * row, at home."""
        ...

    def send_counted(self, batch: Batch, setup: ExpertSetup, wire: Wire) -> Counted: ...

    def return_counted(self, sums: Tensor, setup: ExpertSetup, handle: Any) -> Tensor:
        """(N, K) bf16, one sum a received token -> (T, K): routed_scaling_factor * the sum over the ranks."""
        ...

    def send_expanded(self, batch: Batch, setup: ExpertSetup, wire: Wire) -> Expanded: ...

    def return_expanded(self, rows: Tensor, setup: ExpertSetup, handle: Any) -> Tensor:
        """(M, K) bf16 weighted rows -> (T, K): routed_scaling_factor * the sum over the routes."""
        ...
