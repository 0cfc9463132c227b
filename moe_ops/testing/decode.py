"""Decodes quantised tensors from the formats' definitions: float64, tables and explicit indices, no op's code."""

import torch
from torch import Tensor

from moe_ops.recipes import Recipe


def _e4m3_table() -> Tensor:
    """Value of each e4m3fn code: 1 sign, 4 exponent (bias 7), 3 mantissa bits; 0x7f and 0xff are NaN."""
    values = []
    for code in range(256):
        sign = -1.0 if code & 0x80 else 1.0
        exponent, mantissa = code >> 3 & 15, code & 7
        if exponent == 15 and mantissa == 7:
            values.append(float("nan"))
        elif exponent == 0:
            values.append(sign * mantissa * 2.0**-9)
        else:
            values.append(sign * (8 + mantissa) * 2.0 ** (exponent - 10))
    return torch.tensor(values, dtype=torch.float64)


_E4M3 = _e4m3_table()
_E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)
_E8M0 = torch.tensor([2.0 ** (code - 127) for code in range(255)] + [float("nan")], dtype=torch.float64)


def decode_e4m3(x: Tensor) -> Tensor:
    return _E4M3[x.view(torch.uint8).long()]


def decode_e2m1(x: Tensor) -> Tensor:
    """(..., K / 2) bytes -> (..., K)."""
    byte = x.view(torch.uint8).long()
    out = torch.empty(*byte.shape[:-1], 2 * byte.shape[-1], dtype=torch.float64)
    out[..., 0::2], out[..., 1::2] = _E2M1[byte % 16], _E2M1[byte // 16]
    return out


def decode_words(scale: Tensor, groups: int) -> Tensor:
    """(..., ceil(groups / 4)) int32 -> (..., groups): byte b of word c is the exponent of group 4c + b."""
    word = scale.long() % 2**32
    return torch.stack([_E8M0[word[..., g // 4] // 256 ** (g % 4) % 256] for g in range(groups)], -1)


def decode_rows(x: Tensor, scale: Tensor | None, recipe: Recipe) -> Tensor:
    """Activations (..., K) in float64. Rows may hold garbage; what they decode to is garbage too."""
    if not recipe.quantised:
        return x.double()
    assert scale is not None
    groups = x.shape[-1] // recipe.x_group
    factors = decode_words(scale, groups) if scale.dtype == torch.int32 else scale.double()
    column = torch.arange(x.shape[-1]) // recipe.x_group
    return decode_e4m3(x) * factors[..., column]


def decode_weight(w: Tensor, scale: Tensor | None, recipe: Recipe) -> Tensor:
    """Prepared weights (E, N, K) in float64."""
    if not recipe.quantised:
        return w.double()
    assert scale is not None
    values = decode_e2m1(w) if recipe.w_pack == 2 else decode_e4m3(w)
    N, K = values.shape[1:]
    rows, columns = recipe.w_block
    column = torch.arange(K) // columns
    if scale.dtype == torch.int32:
        return values * decode_words(scale, -(-K // columns))[:, :, column]
    return values * scale.double()[:, torch.arange(N) // rows][:, :, column]
