"""Encodes float tensors into checkpoint formats from the formats' definitions: float64 and tables, no op's code.

The counterpart of decode.py: what synthetic checkpoints are written with.
"""

import torch
from torch import Tensor

from moe_ops.testing.decode import decode_e2m1, decode_e4m3

_POSITIVE_E4M3 = decode_e4m3(torch.arange(127, dtype=torch.uint8))  # codes 0 to 126: 0 to 448
_POSITIVE_E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)


def _nearest(x: Tensor, table: Tensor) -> Tensor:
    """Index of the nearest entry of an increasing table; ties to the even index; beyond the last, the last."""
    middle = (table[1:] + table[:-1]) / 2
    below, above = torch.bucketize(x, middle), torch.bucketize(x, middle, right=True)
    return torch.where(below % 2 == 0, below, above)


def encode_e4m3(x: Tensor) -> Tensor:
    """float8_e4m3fn, nearest even, saturating."""
    x = x.double()
    code = _nearest(x.abs(), _POSITIVE_E4M3) + 128 * torch.signbit(x)
    return code.to(torch.uint8).view(torch.float8_e4m3fn)


def encode_e2m1(x: Tensor) -> Tensor:
    """(..., K) -> (..., K / 2) uint8, even columns in the low nibble."""
    x = x.double()
    code = _nearest(x.abs(), _POSITIVE_E2M1) + 8 * torch.signbit(x)
    return (code[..., 0::2] + 16 * code[..., 1::2]).to(torch.uint8)


def encode_mx(x: Tensor, dtype: str) -> tuple[Tensor, Tensor]:
    """(values, exponent bytes (..., K / 32) uint8) of MXFP8 (e4m3) or MXFP4 (e2m1); scales rounded up, so nothing
    saturates. An all-zero group has byte 0."""
    grouped = x.double().unflatten(-1, (-1, 32))
    top = 448.0 if dtype == "e4m3" else 6.0
    exponent = torch.log2(grouped.abs().amax(-1) / top).ceil().clamp(-127, 127)
    scaled = (grouped * 2.0 ** -exponent[..., None]).flatten(-2)
    values = encode_e4m3(scaled) if dtype == "e4m3" else encode_e2m1(scaled)
    return values, (exponent + 127).to(torch.uint8)


def encode_block(x: Tensor, block: tuple[int, int], *, powers_of_two: bool = False) -> tuple[Tensor, Tensor]:
    """(e4m3 values (N, K), float32 scales (ceil(N / rows), ceil(K / columns))), scale = amax / 448."""
    N, K = x.shape
    rows, columns = block
    amax = torch.tensor(
        [[x[i : i + rows, j : j + columns].abs().max() for j in range(0, K, columns)] for i in range(0, N, rows)],
        dtype=torch.float64,
    )
    scale = (amax / 448).float()
    if powers_of_two:
        scale = torch.exp2(torch.log2(scale.double()).ceil()).float()
    return encode_e4m3(x.double() / _spread(scale, N, K, block)), scale


def encode_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """(e4m3 values (N, K), float32 scales (N, 1)): one scale per output channel."""
    scale = (x.double().abs().amax(1, keepdim=True) / 448).float()
    return encode_e4m3(x.double() / scale.double()), scale


def encode_tensor(x: Tensor) -> tuple[Tensor, Tensor]:
    """(e4m3 values (N, K), float32 scale of shape ())."""
    scale = (x.double().abs().max() / 448).float()
    return encode_e4m3(x.double() / scale.double()), scale


def decode_mx(values: Tensor, exponent: Tensor, dtype: str) -> Tensor:
    """float64 (..., K)."""
    plain = decode_e4m3(values) if dtype == "e4m3" else decode_e2m1(values)
    return plain * (2.0 ** (exponent.double() - 127)).repeat_interleave(32, -1)


def decode_block(values: Tensor, scale: Tensor, block: tuple[int, int]) -> Tensor:
    """float64 (N, K)."""
    return decode_e4m3(values) * _spread(scale, values.shape[0], values.shape[1], block)


def _spread(scale: Tensor, N: int, K: int, block: tuple[int, int]) -> Tensor:
    return scale.double()[torch.arange(N) // block[0]][:, torch.arange(K) // block[1]]
