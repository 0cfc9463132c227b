"""Scales as the kernels read them: MN-major, padded to 16 bytes, fp32 or four UE8M0 to a word.

A UE8M0 byte b is the power of two 2^(b - 127): the exponent byte of an fp32 number; 255 is NaN.
Byte j (little endian) of word c is group 4c + j.
"""

import torch

from ._check import dtype, require, sizes
from .settings import get_mk_alignment_for_contiguous_layout

_SIGN_AND_MANTISSA = 0x807FFFFF - (1 << 32)  # as int32


def tma_aligned_size(mn: int, element_size: int) -> int:
    """mn rounded up to a multiple of 16 bytes, in elements."""
    ok = element_size > 0 and 16 % element_size == 0
    fix = "Give the size of a scale, 4."
    require(ok, "get_tma_aligned_size", "element_size", "a divisor of 16", element_size, fix)
    step = 16 // element_size
    return -(-mn // step) * step


def _empty(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """([G,] mn, w) MN-major on zeroed storage ([G,] w, padded mn), so padding is always finite."""
    *groups, mn, width = shape
    padded = tma_aligned_size(mn, 4)
    storage = torch.zeros((*groups, width, padded), dtype=dtype, device=device)
    return storage.mT[..., :mn, :]


def _check_source(op: str, argument: str, sf: torch.Tensor) -> None:
    rule = "([groups,] mn, k groups), 2-D or 3-D"
    got = f"shape {sizes(sf.shape)}"
    require(sf.dim() in (2, 3), op, argument, rule, got, "Give one matrix, or one a group.")
    fix = "Integer scales are packed already; convert others with .float()."
    dtype(op, argument, sf, [torch.float32], fix)


def is_mn_major(sf: torch.Tensor) -> bool:
    """Whether ([G,] mn, w) already has the strides (padded mn * w, 1, padded mn)."""
    padded = tma_aligned_size(sf.size(-2), sf.element_size())
    ok = sf.stride(-2) == 1 and sf.stride(-1) == padded
    return ok and (sf.dim() == 2 or sf.stride(0) == padded * sf.size(-1))


def to_mn_major(op: str, argument: str, sf: torch.Tensor) -> torch.Tensor:
    """The fp32 scales MN-major; the same memory if they already are."""
    _check_source(op, argument, sf)
    return sf if is_mn_major(sf) else _empty(sf.shape, sf.dtype, sf.device).copy_(sf)


def psum_rows(psum: torch.Tensor, mn: int) -> torch.Tensor:
    """(mn,) bool: rows inside a group when group e is [align(end[e-1]), end[e])."""
    block = get_mk_alignment_for_contiguous_layout()
    row = torch.arange(mn, device=psum.device)[:, None]
    start = torch.zeros_like(psum)
    start[1:] = (psum[:-1] + block - 1) // block * block
    return ((row >= start) & (row < psum)).any(1)


def pack_ue8m0(
    op: str,
    argument: str,
    sf: torch.Tensor,
    psum: torch.Tensor | None = None,
) -> torch.Tensor:
    """fp32 powers of two ([G,] mn, w) -> int32 ([G,] mn, ceil(w / 4)), MN-major.

    Rows outside the groups of `psum` are neither inspected nor copied: their bytes are 0.
    Library: a scale that is no power of two stops the kernel, or on layouts that have no kernel
    loses its mantissa without a word. Here it always raises.
    """
    _check_source(op, argument, sf)
    mn, width = sf.shape[-2:]
    if psum is not None:
        rule = "2-D and contiguous when psum_layout is given"
        got = f"shape {sizes(sf.shape)}, strides {sizes(sf.stride())}"
        ok = (sf.dim() == 2 or sf.size(0) == 1) and sf.is_contiguous()
        require(ok, op, argument, rule, got, "Call .contiguous().")
        dtype(op, "psum_layout", psum, [torch.int32], "Convert it with .int().")
        ok = psum.numel() > 0 and psum.is_contiguous()
        got = f"shape {sizes(psum.shape)}, strides {sizes(psum.stride())}"
        require(ok, op, "psum_layout", "contiguous, with a group", got, "Call .contiguous().")
    elif not sf.is_contiguous() and mn % 4 == 0 and (sf.dim() == 2 or sf.size(0) == 1):
        rule = f"contiguous, or MN-major with strides (1, {mn})"
        got = f"strides {sizes(sf.stride()[-2:])}"
        ok = sf.stride(-2) == 1 and sf.stride(-1) == mn
        require(ok, op, argument, rule, got, "Call .contiguous().")

    bits = sf.contiguous().view(torch.int32)
    if psum is not None:
        bits = torch.where(psum_rows(psum, mn)[:, None], bits, 0)
    bad = (bits & _SIGN_AND_MANTISSA).ne(0)
    if bad.any():
        index = tuple(bad.nonzero()[0].tolist())
        where = f"{argument}[{', '.join(map(str, index))}]"
        fix = "Round scales up with ceil_to_ue8m0 before quantising with them; rounding only the "
        fix += "scale changes every value of its group."
        require(False, op, where, "a positive power of two", repr(sf[index].item()), fix)

    words = -(-width // 4)
    exponents = bits.new_zeros((*sf.shape[:-1], 4 * words))
    exponents[..., :width] = bits >> 23
    b0, b1, b2, b3 = exponents.unflatten(-1, (words, 4)).unbind(-1)
    out = _empty(sf.shape[:-1] + (words,), torch.int32, sf.device)
    return out.copy_(b0 | b1 << 8 | b2 << 16 | b3 << 24)


def unpack_ue8m0(words: torch.Tensor, width: int) -> torch.Tensor:
    """int32 (..., w) -> float64 (..., width): what the tensor cores multiply by."""
    shifts = torch.arange(0, 32, 8, device=words.device, dtype=torch.int32)
    bytes_ = (words[..., None] >> shifts & 0xFF).flatten(-2)[..., :width]
    value = (bytes_.long() - 127 + 1023 << 52).view(torch.float64)  # exact, unlike exp2
    return value.masked_fill(bytes_ == 255, float("nan"))
