"""Wire: a token between ranks, as one row of bytes."""

from dataclasses import dataclass

import torch
from torch import Tensor

from moe_ops import check
from moe_ops import forward as _ops  # noqa: F401  registers the ops
from moe_ops.dispatch.setup import ExpertSetup
from moe_ops.recipes import Recipe


@dataclass(frozen=True)
class Tokens:
    """Rows in the form that a recipe's experts compute in, before they are sorted."""

    x: Tensor
    """(N, K) in the recipe's activation dtype."""
    scale: Tensor | None
    """(N, G) of the recipe's groups: float32, or uint8 exponents for ue8m0; row-major. None without scales."""


@dataclass(frozen=True)
class Wire:
    """bf16: the values. fp8: e4m3 values, then one scale per `group` columns (float32, or one ue8m0 byte).

    Quantising before the journey or behind it gives the same bits when `group` is the recipe's own.
    """

    K: int
    payload: str
    group: int
    recipe: Recipe
    scale_format: str

    @classmethod
    def of(cls, op: str, setup: ExpertSetup, allowed: tuple[str, ...], group: int = 0) -> "Wire":
        """The wire of a format that allows these payloads. group: columns a scale; 0: the recipe's.

        Raises:
            ValueError: the payload is not the format's, or fp8 for a recipe that computes in bf16.
        """
        recipe = setup.row
        payload = setup.payload
        if payload == "auto":
            payload = "fp8" if recipe.quantised and "fp8" in allowed else "bf16"
        check.one_of(op, "payload", payload, allowed, "That is what this format carries.")
        fix = f"Recipe {recipe.name} computes in bf16; pass payload='bf16'."
        check.value(payload == "bf16" or recipe.quantised, op, "payload", "bf16", payload, fix)
        group = group or recipe.x_group
        if payload == "fp8":
            check.multiple(op, "K", setup.K, group, f"fp8 travels with one scale per {group} columns.")
        return cls(setup.K, payload, group, recipe, setup.scale_format)

    @property
    def nbytes(self) -> int:
        """Bytes of one token."""
        if self.payload == "bf16":
            return 2 * self.K
        return self.K + self.K // self.group * self._scale_bytes

    @property
    def _scale_bytes(self) -> int:
        return 4 if self.scale_format == "fp32" else 1

    def encode(self, hidden_states: Tensor) -> Tensor:
        """(T, K) float -> (T, nbytes) uint8."""
        if self.payload == "bf16":
            return as_bytes(hidden_states.to(torch.bfloat16))
        tokens = self.quantised(hidden_states)
        assert tokens.scale is not None
        return torch.cat((tokens.x.view(torch.uint8), as_bytes(tokens.scale)), 1)

    def quantised(self, hidden_states: Tensor) -> Tokens:
        """(T, K) float in e4m3, scales in the wire's groups."""
        return _quantised(hidden_states, self.group, self.scale_format)

    def decode(self, packet: Tensor) -> Tokens:
        """(N, nbytes) uint8 -> rows as the experts want them."""
        if self.payload == "bf16":
            return self.tokens(from_bytes(packet, torch.bfloat16))
        scale = from_bytes(packet[:, self.K :], torch.float32 if self.scale_format == "fp32" else torch.uint8)
        return self.received(from_bytes(packet[:, : self.K], self.recipe.x_dtype), scale)

    def received(self, x: Tensor, scale: Tensor) -> Tokens:
        """Quantised rows with one scale per `group` columns (..., K / group), brought to the recipe's groups."""
        finer = self.group // self.recipe.x_group
        return Tokens(x, scale if finer == 1 else scale.repeat_interleave(finer, -1))

    def tokens(self, hidden_states: Tensor) -> Tokens:
        """(N, K) bf16 rows, quantised if the recipe wants it."""
        if not self.recipe.quantised:
            return Tokens(hidden_states, None)
        return _quantised(hidden_states, self.recipe.x_group, self.scale_format)


def _quantised(x: Tensor, group: int, scale_format: str) -> Tokens:
    values, scale = torch.ops.moe.quantize(x, group=group, scale_format=scale_format)
    if scale_format == "ue8m0":  # four exponents a word
        scale = as_bytes(scale)[:, : x.shape[1] // group]
    return Tokens(values, scale)


def as_bytes(x: Tensor) -> Tensor:
    """(N, n) -> (N, n * itemsize) uint8, a copy."""
    return _dense(x).view(torch.uint8)


def from_bytes(x: Tensor, dtype: torch.dtype) -> Tensor:
    """(N, bytes) uint8 -> (N, bytes / itemsize), a copy."""
    return _dense(x).view(dtype)


def _dense(x: Tensor) -> Tensor:
    """Copied even if it counts as contiguous: axes of size 1 may have strides, and slices offsets, that no view to
    another dtype accepts."""
    return x.clone(memory_format=torch.contiguous_format)
