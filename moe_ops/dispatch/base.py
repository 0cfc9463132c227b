"""Dispatcher: one format's way to the experts and back."""

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import torch
from torch import Tensor

from moe_ops import check
from moe_ops.capture import capturing
from moe_ops.dispatch.experts import ExpertRows
from moe_ops.dispatch.setup import ExpertSetup
from moe_ops.dispatch.transport import Batch, Transport
from moe_ops.rows import BLOCK, align, ceil_div


class Dispatcher(ABC):
    """dispatch -> pre_permute -> experts -> post_permute -> combine. Ranks call in step, with or without tokens.

    What travels from the way in to the way out is the frozen dataclass that `dispatch` returns, and nothing else: one
    dispatcher may serve many layers, and calls may overlap.

    Args:
        setup: the same on every rank.
        transport: this rank's end.

    Raises:
        ValueError: sizes that the format or the transport cannot carry.
    """

    name: ClassVar[str]
    layouts: ClassVar[tuple[str, ...]]
    """Of the rows that pre_permute makes."""
    payloads: ClassVar[tuple[str, ...]]
    weights_applied_in: ClassVar[str]
    """post_permute, on the experts' rank, or combine, at home."""
    scaled_in: ClassVar[str]
    """Where routed_scaling_factor multiplies, once."""
    sums: ClassVar[str]
    """What is rounded to bf16 for the way back. rows: GEMM2's rows as they are, so that the result is bit for bit that
    of one rank with all tokens. weighted rows, or partial sums of one rank: it differs by those roundings."""
    needs_host_counts: ClassVar[bool] = False
    """Whether dispatch reads counts on the host: no CUDA graph and no fullgraph compile then."""
    needs_capacity: ClassVar[bool] = True
    """Whether setup.max_tokens must be given."""
    reduces: ClassVar[bool] = True
    """Whether combine adds over the ranks. Otherwise the model's tail does."""

    def __init__(self, setup: ExpertSetup, transport: Transport):
        op = f"dispatch {self.name}"
        self.op, self.setup, self.transport = op, setup, transport
        self.local_experts = setup.local_experts(transport.rank, transport.size)
        if self.needs_capacity:
            fix = "It is the static capacity that this format needs: the most tokens that one rank may bring."
            check.value(setup.max_tokens is not None, op, "max_tokens", "given", None, fix)

    @abstractmethod
    def dispatch(self, hidden_states: Tensor, topk_weights: Tensor, topk_ids: Tensor) -> Any:
        """This rank's tokens (T, K), (T, top_k), (T, top_k) to the ranks that have their experts; ids are global."""

    @abstractmethod
    def pre_permute(self, state: Any) -> ExpertRows:
        """What arrived, as the rows that the experts read."""

    @abstractmethod
    def post_permute(self, down: Tensor, rows: ExpertRows, state: Any, w2_bias: Tensor | None = None) -> Tensor:
        """GEMM2's result as combine wants it."""

    @abstractmethod
    def combine(self, out: Tensor, state: Any) -> Tensor:
        """(T, K) for this rank's tokens, in the dtype of hidden_states."""

    def _batch(self, hidden_states: Tensor, topk_weights: Tensor, topk_ids: Tensor) -> Batch:
        self.setup.check_tokens(self.op, hidden_states, topk_weights, topk_ids, capacity=self.needs_capacity)
        if self.needs_host_counts:
            self._refuse_capture()
        return Batch(hidden_states, topk_weights, topk_ids)

    def _refuse_capture(self) -> None:
        if torch.compiler.is_compiling() or capturing():
            raise RuntimeError(refusal(self.name))

    @property
    def slots(self) -> int:
        """Tokens that all ranks together may bring."""
        assert self.setup.max_tokens is not None
        return self.transport.size * self.setup.max_tokens

    @property
    def slab_rows(self) -> int:
        """m_max of one expert's slab: every token may choose the same expert, so no routing overflows."""
        return align(self.slots, BLOCK)

    @property
    def expected_m(self) -> int:
        """Mean rows an expert when every rank is full: a tuning hint."""
        return ceil_div(self.slots * self.setup.top_k, self.setup.num_experts)


def refusal(name: str) -> str:
    """Why a format with host counts is not captured."""
    return (
        f"dispatch {name}: format must be one without host counts inside a CUDA graph or a compiled graph; got {name}, "
        "which reads on the host how many tokens arrive. Choose deepep_ll, deepep_v2_masked, deepep_v2_expanded or "
        "flashinfer for what is captured."
    )
