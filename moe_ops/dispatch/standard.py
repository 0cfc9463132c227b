"""standard: every rank of the group has all tokens and computes its own experts; the model's tail adds up."""

from torch import Tensor

from moe_ops.dispatch.tokens import PlainTokens, TokenDispatcher


class Standard(TokenDispatcher):
    """Nothing travels. combine returns this rank's part of the sum."""

    name = "standard"
    needs_capacity = False
    reduces = False

    def dispatch(self, hidden_states: Tensor, topk_weights: Tensor, topk_ids: Tensor) -> PlainTokens:
        self._batch(hidden_states, topk_weights, topk_ids)
        return PlainTokens(hidden_states, topk_weights, topk_ids)

    def combine(self, out: Tensor, state: PlainTokens) -> Tensor:
        return out
