"""Source: one matrix of one expert as a checkpoint holds it, and what its kind fixes."""

from dataclasses import dataclass, replace
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_ops import check
from moe_ops.recipes import FLOATS
from moe_ops.reference.quantize import byte_value
from moe_ops.rows import ceil_div

MX_GROUP = 32
"""Columns that share one scale in both MX formats."""

BLOCK = (128, 128)

SOURCES = ("float", "mxfp4", "fp8_block", "fp8_tensor", "fp8_channel", "mxfp8")
CODES = (torch.int8, torch.uint8, torch.float4_e2m1fn_x2)
E4M3 = torch.float8_e4m3fn
EXPONENTS = (torch.uint8, torch.float8_e8m0fnu)

VALUE_DTYPES = {"float": FLOATS, "mxfp4": CODES} | {kind: (E4M3,) for kind in SOURCES if "fp8" in kind}
SCALE_DTYPES = {
    "mxfp4": (*EXPONENTS, torch.float32),
    "mxfp8": (*EXPONENTS, torch.float32),
    "fp8_block": (torch.float32, torch.bfloat16, torch.float8_e8m0fnu),
    "fp8_tensor": (torch.float32, torch.bfloat16),
    "fp8_channel": (torch.float32, torch.bfloat16),
}

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


@lru_cache
def _pairs(device: torch.device) -> Tensor:
    """Both e2m1 values of each byte, low nibble first, as the bits of two bfloat16: one look-up decodes two."""
    nibble = torch.tensor(_E2M1, dtype=torch.bfloat16, device=device)
    return torch.stack((nibble.repeat(16), nibble.repeat_interleave(16)), 1).view(torch.int32).flatten()


def pack_of(kind: str) -> int:
    """Values in one stored element."""
    return 2 if kind == "mxfp4" else 1


def group_of(kind: str, block: tuple[int, int] = BLOCK) -> tuple[int, int]:
    """(rows, columns) that share a scale: a matrix may only be cut at multiples of them. 1 where any cut will do."""
    if kind in ("mxfp4", "mxfp8"):
        return (1, MX_GROUP)
    return block if kind == "fp8_block" else (1, 1)


def scale_shape(kind: str, N: int, K: int, block: tuple[int, int] = BLOCK) -> tuple[int, ...]:
    """The shape of the scale of an (N, K) matrix."""
    rows, columns = group_of(kind, block)
    if kind == "fp8_tensor":
        return ()
    return (N, 1) if kind == "fp8_channel" else (ceil_div(N, rows), ceil_div(K, columns))


@dataclass(frozen=True, eq=False)
class Source:
    """One (N, K) matrix in a checkpoint's format. Nothing is computed until a preparation path reads it."""

    kind: str
    values: Tensor
    """(N, K) float or float8_e4m3fn; for mxfp4 (N, K / 2) codes, low nibble = even column."""
    scale: Tensor | None = None
    """As scale_shape says: exponent bytes (uint8) for MX, float32 for fp8. None for float."""
    block: tuple[int, int] = BLOCK
    """(rows, columns) that share a scale; fp8_block only."""

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        N, stored = self.values.shape
        return N, stored * pack_of(self.kind)

    @property
    def nbytes(self) -> int:
        scale = 0 if self.scale is None else self.scale.nbytes
        return self.values.nbytes + scale

    @property
    def factors(self) -> Tensor:
        """The scale. A float source has none."""
        assert self.scale is not None
        return self.scale

    def to(self, device: torch.device) -> "Source":
        scale = None if self.scale is None else self.scale.to(device)
        return replace(self, values=self.values.to(device), scale=scale)

    def rows(self, first: int, last: int) -> "Source":
        """Rows [first, last). `first` is a multiple of the rows that share a scale."""
        scale = self.scale
        if scale is not None and scale.dim() == 2:
            group, _ = group_of(self.kind, self.block)
            scale = scale[first // group : ceil_div(last, group)]
        return replace(self, values=self.values[first:last], scale=scale)

    def padded(self, N: int, K: int) -> "Source":
        """Zeros below and to the right up to (N, K). New scales are 1."""
        if self.shape == (N, K):
            return self
        values = _pad(self.values, N, K // pack_of(self.kind), 0)
        scale = self.scale
        if scale is not None and scale.dim() == 2:
            rows, columns = scale_shape(self.kind, N, K, self.block)
            scale = _pad(scale, rows, columns, 127 if scale.dtype == torch.uint8 else 1.0)
        return replace(self, values=values, scale=scale)

    def float(self) -> Tensor:
        """(N, K) float32: values times scales."""
        if self.kind == "float":
            return self.values.float()
        if self.kind == "mxfp4":
            return spread(decode_e2m1(self.values).float(), byte_value(self.factors), (1, MX_GROUP))
        if self.kind == "mxfp8":
            return spread(self.values.float(), byte_value(self.factors), (1, MX_GROUP))
        if self.kind == "fp8_block":
            return spread(self.values.float(), self.factors, self.block)
        return self.values.float() * self.factors


def spread(values: Tensor, scale: Tensor, block: tuple[int, int]) -> Tensor:
    """values (N, K) times the scale of the (rows, columns) block that each lies in."""
    for axis, size in enumerate(block):
        if size > 1:
            scale = scale.repeat_interleave(size, axis).narrow(axis, 0, values.shape[axis])
    return values * scale


def decode_e2m1(packed: Tensor) -> Tensor:
    """(N, K) bfloat16 of (N, K / 2) codes. bfloat16 holds every e2m1 value exactly, and every power of two times it."""
    index = packed.view(torch.uint8).int()
    return _pairs(packed.device)[index].view(torch.bfloat16)


def exponents(op: str, name: str, scale: Tensor) -> Tensor:
    """MX scales as exponent bytes (uint8): bytes as they are, fp32 only if each is a power of two.

    Raises:
        ValueError: an fp32 scale is not a power of two, or a byte is 255 (NaN); names the first.
    """
    if scale.dtype in EXPONENTS:
        byte = scale.view(torch.uint8)
        _refuse(op, name, byte, byte == 255, "exponent bytes from 0 to 254", "255 is NaN: the file is damaged.")
        return byte
    mantissa, exponent = torch.frexp(scale.float())
    byte = exponent + 126
    wrong = (mantissa != 0.5) | (byte < 0) | (byte > 254)
    fix = "Rounding a scale would change every value under it: requantise the weights from their float form."
    _refuse(op, name, scale, wrong, "powers of two", fix)
    return byte.to(torch.uint8)


def finite(op: str, name: str, scale: Tensor) -> Tensor:
    """fp8 scales as float32.

    Raises:
        ValueError: one is negative, infinite or NaN; names the first.
    """
    scale = scale.float()
    wrong = ~(scale.isfinite() & (scale >= 0))
    _refuse(op, name, scale, wrong, "finite and at least 0", "The file is damaged.")
    return scale


def _refuse(op: str, name: str, scale: Tensor, wrong: Tensor, rule: str, fix: str) -> None:
    if wrong.any():
        index = tuple(int(i) for i in wrong.nonzero()[0])
        check.value(False, op, name, rule, f"{scale[index].item()!r} at {index}", fix)


def _pad(tensor: Tensor, rows: int, columns: int, fill: int | float) -> Tensor:
    """torch cannot pad one-byte floats, so their bytes are padded."""
    raw = tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor
    grown = F.pad(raw, (0, columns - raw.shape[1], 0, rows - raw.shape[0]), value=fill)
    return grown.view(tensor.dtype)
