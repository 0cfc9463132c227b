"""Operands: what the GEMMs accept as a and b, and the numbers they stand for."""

from dataclasses import dataclass

import torch

from . import _check
from ._arch import arch_major
from ._check import require, short, sizes
from ._pack import unpack_ue8m0

# Indexed by code: sign bit 8, then the eight magnitudes.
_E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
_E2M1 += [-value for value in _E2M1]


@dataclass(frozen=True)
class Matrix:
    """One operand of a GEMM, [num_groups matrices of] mn rows of k values, with its scales.

    values: bf16 or e4m3 ([G,] mn, k), or int8 with two e2m1 to a byte along the contiguous
        dimension: ([G,] mn, k / 2) if k_major, else ([G,] mn / 2, k); low nibble first.
    scale: None for bf16; fp32 ([G,] ceil(mn / gran_mn), ceil(k / gran_k)); or int32 with four
        UE8M0 bytes to a word along k.
    """

    values: torch.Tensor
    k_major: bool
    num_groups: int
    mn: int
    k: int
    scale: torch.Tensor | None = None
    gran_mn: int = 1
    gran_k: int = 128

    @property
    def packed(self) -> bool:
        return self.values.dtype == torch.int8

    def dequantise(
        self,
        group: int | None = None,
        rows: slice | torch.Tensor | None = None,
    ) -> torch.Tensor:
        """float64 (rows, k), of one group if 3-D. `rows` of packed values need k_major."""
        values = self.values if group is None else self.values[group]
        scale = self.scale
        if scale is not None and group is not None:
            scale = scale[group]
        if rows is None:
            rows = slice(0, self.mn)
        if self.packed:
            values = _unpack_e2m1(values if not self.k_major else values[rows], self.k_major)
        elif values.dtype == torch.float8_e4m3fn:
            values = values.view(torch.uint8)[rows].view(torch.float8_e4m3fn)
        else:
            values = values[rows]
        values = values.to(torch.float64)
        return values if scale is None else values * self._scales(scale, rows)

    def _scales(self, scale: torch.Tensor, rows: slice | torch.Tensor) -> torch.Tensor:
        if self.gran_mn > 1:
            scale = scale.repeat_interleave(self.gran_mn, 0)
        scale = scale[rows]
        groups = -(-self.k // self.gran_k)
        if scale.dtype == torch.int32:
            scale = unpack_ue8m0(scale, groups)
        return scale.double().repeat_interleave(self.gran_k, 1)[:, : self.k]


def _unpack_e2m1(packed: torch.Tensor, k_major: bool) -> torch.Tensor:
    byte = packed.contiguous().view(torch.uint8).int()
    table = torch.tensor(_E2M1, dtype=torch.float64, device=packed.device)
    pair = torch.stack([table[byte & 0xF], table[byte >> 4]], -1)
    return pair.flatten(-2) if k_major else pair.movedim(-1, -2).flatten(-3, -2)


def read_matrix(op: str, name: str, values: torch.Tensor, num_dims: int, axes: str) -> Matrix:
    """The operand without its scales, after the library's checks of strides and dtype.

    Raises:
        ValueError: dimensions, or strides that are neither K-major nor MN-major.
        TypeError: dtype.
        NotImplementedError: packed e2m1 on sm90.
    """
    _check.rank(op, name, values, num_dims, axes)
    if num_dims == 3 and values.numel():
        require(
            values.stride(0) == values.size(1) * values.size(2),
            op,
            name,
            f"without gaps between groups, stride(0) = {values.size(1) * values.size(2)}",
            values.stride(0),
            "Call .contiguous().",
        )
    require(
        1 in values.stride()[-2:],
        op,
        name,
        "contiguous along one of its last two dimensions",
        f"strides {sizes(values.stride())}",
        "Call .contiguous().",
    )
    k_major = values.stride(-1) == 1
    mn, k = values.shape[-2:]
    if values.dtype == torch.int8:
        mn, k = (mn, 2 * k) if k_major else (2 * mn, k)
    return Matrix(values, k_major, values.size(0) if num_dims == 3 else 1, mn, k)


def check_bf16(op: str, **operands: Matrix) -> None:
    for name, operand in operands.items():
        fix = "Quantised values go to the fp8 functions."
        _check.dtype(op, name, operand.values, [torch.bfloat16], fix)


def check_quantised(op: str, **operands: Matrix) -> None:
    """e4m3 anywhere; packed e2m1 as int8 on sm100 and sm120."""
    for name, operand in operands.items():
        kind = operand.values.dtype
        allowed = [torch.float8_e4m3fn, torch.int8]
        fix = "Packed e2m1 is int8: view it with .view(torch.int8)."
        _check.dtype(op, name, operand.values, allowed, fix)
        require(
            kind != torch.int8 or arch_major() != 9,
            op,
            name,
            "float8_e4m3fn on sm90",
            short(kind),
            "Convert the weights to e4m3, or set DG_STUB_ARCH=10.",
            NotImplementedError,
        )


def check_k_major(op: str, **operands: Matrix) -> None:
    for name, operand in operands.items():
        require(
            operand.k_major,
            op,
            name,
            "K-major, last stride 1",
            f"strides {sizes(operand.values.stride())}",
            "Pass (.., mn, k) contiguous, not a transposed view.",
        )


def check_same_k(op: str, a: Matrix, b: Matrix) -> None:
    fix = "Packed e2m1 counts two to a byte."
    require(a.k == b.k, op, "b", f"of a's k = {a.k}", f"k = {b.k}", fix)


def check_kernel(op: str, a: Matrix, b: Matrix, d: torch.Tensor) -> None:
    """What the copy engine and the kernels ask for, once the shapes are known to be non-empty."""
    for name, operand in {"a": a, "b": b}.items():
        _check.tma(op, name, operand.values)
        if operand.packed and (a.packed != b.packed or arch_major() == 10):
            inner = operand.k if operand.k_major else operand.mn
            rule = "a multiple of 128 values along its contiguous dimension (packed e2m1)"
            require(inner % 128 == 0, op, name, rule, inner, "Pad it with zeros.")
        if operand.scale is not None:
            address = operand.scale.data_ptr() % 16
            rule, got = "at an address that is a multiple of 16 bytes", f"{address} bytes past it"
            fix = "Do not slice in front of it; copy it."
            require(address == 0, op, f"{name}'s scale", rule, got, fix)
    if arch_major() != 12:  # sm120 stores element by element
        _check.tma(op, "d", d)
