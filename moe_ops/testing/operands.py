"""Quantised operands that no quantiser made, and a judge of their products: any code, garbage where nobody may read."""

import torch
from torch import Tensor

from moe_ops.spec import TensorSpec

ACCUMULATED = 2.0**-20
"""Error of a float32 sum, relative to the sum of magnitudes: 16 half-steps of 2^-24. Sums of a few thousand terms that
are added in blocks stay below it."""


def codes(*shape: int, generator: torch.Generator) -> Tensor:
    """Any e4m3 value but NaN, subnormals and both zeros included; small magnitudes, so that sums do not drown."""
    byte = torch.randint(0, 0x50, shape, generator=generator) + 128 * torch.randint(0, 2, shape, generator=generator)
    return byte.to(torch.uint8).view(torch.float8_e4m3fn)


def words(*shape: int, groups: int, generator: torch.Generator) -> Tensor:
    """MN-major packed exponents; bytes past the last group and the padding of M hold garbage."""
    byte = torch.randint(118, 132, (*shape, 4 * -(-groups // 4)), generator=generator)
    byte[..., groups:] = 255
    out = TensorSpec.mn_major(*shape, byte.shape[-1] // 4, dtype=torch.int32).empty("cpu")
    return out.copy_(byte.to(torch.uint8).view(torch.int32))


def floats(spec: TensorSpec, *, generator: torch.Generator) -> Tensor:
    """Positive scales of a layout."""
    return spec.empty("cpu").copy_(torch.rand(spec.shape, generator=generator) + 0.01)


def assert_products(got: Tensor, x: Tensor, w: Tensor, error: float = ACCUMULATED) -> None:
    """Asserts that `got` is x @ w.T of float64 matrices, rounded once to its dtype after a sum of this error."""
    exact, slack = x @ w.T, error * (x.abs() @ w.abs().T)
    low, high = ((exact + sign * slack).to(got.dtype).double() for sign in (-1, 1))
    wrong = ~((low <= got.double()) & (got.double() <= high))
    assert got.shape == exact.shape, f"{tuple(got.shape)} instead of {tuple(exact.shape)}"
    assert not wrong.any(), f"{int(wrong.sum())} values, first {got[wrong][0]} for {exact[wrong][0]}"
