"""Converted: what a preparation path makes of one matrix, before it is stored."""

from dataclasses import dataclass

import torch
from torch import Tensor

from moe_ops.prep.source import MX_GROUP, decode_e2m1, spread
from moe_ops.recipes import Recipe
from moe_ops.reference.quantize import byte_value


@dataclass(frozen=True, eq=False)
class Converted:
    """One (N, K) matrix in a recipe's form, its scales still in plain layout."""

    values: Tensor
    """(N, K / w_pack) in the recipe's dtype."""
    scale: Tensor | None
    """fp8_block: (N / 128, K / 128) float32. MX: (N, K / 32) exponent bytes. None for bf16."""
    exact: bool
    """Whether the path knows that it dequantises to what the source did; if not, the error is measured."""
    inexact_tiles: int = 0
    tiles: int = 0

    def float(self, recipe: Recipe) -> Tensor:
        """(N, K) float32."""
        if self.scale is None:
            return self.values.float()
        values = decode_e2m1(self.values).float() if recipe.w_pack == 2 else self.values.float()
        if self.scale.dtype == torch.uint8:
            return spread(values, byte_value(self.scale), (1, MX_GROUP))
        return spread(values, self.scale, recipe.w_block)
