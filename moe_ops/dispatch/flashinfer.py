"""flashinfer: the one-sided all-to-all's form. A slot for every token that a rank may bring; bf16 both ways."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_ops import check
from moe_ops.dispatch.tokens import PlainTokens, TokenDispatcher


@dataclass(frozen=True)
class SlotTokens(PlainTokens):
    """In slots, (ranks * max_tokens, ...) bf16; id -1 in empty slots and for other ranks' experts."""

    handle: Any


class FlashInfer(TokenDispatcher):
    """The payload is bf16 without scales, whatever the recipe: pre_permute quantises, as for standard."""

    name = "flashinfer"

    def dispatch(self, hidden_states: Tensor, topk_weights: Tensor, topk_ids: Tensor) -> SlotTokens:
        slots = self.transport.send_slots(self._batch(hidden_states, topk_weights, topk_ids), self.setup)
        return SlotTokens(slots.hidden_states, slots.topk_weights, slots.topk_ids, slots.handle)

    def combine(self, out: Tensor, state: SlotTokens) -> Tensor:
        fix = "Its payload is bf16: pass what post_permute returns."
        check.dtype(self.op, "out", out, (torch.bfloat16,), fix)
        return self.transport.return_slots(out, state.handle)
