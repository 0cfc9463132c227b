"""Casts to e4m3 and e2m1 with their scales, and back. For tests and for preparing weights."""

import torch

from .._check import dtype, rank, require

_FLOOR = 1e-4  # least amax of a group, so that an all-zero group has a finite scale
_E4M3_MAX = 448.0
_E2M1_MAX = 6.0
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_E2M1_MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)


def ceil_div(x: int, y: int) -> int:
    return -(-x // y)


def align(x: int, y: int) -> int:
    """x rounded up to a multiple of y."""
    return ceil_div(x, y) * y


def ceil_to_ue8m0(x: torch.Tensor) -> torch.Tensor:
    """|x| rounded up to a power of two in [2^-126, 2^127], fp32."""
    bits = x.abs().float().view(torch.int32)
    exponent = (bits >> 23) + (bits & 0x7FFFFF).ne(0)
    return (exponent.clamp(1, 254).int() << 23).view(torch.float32)


def pack_ue8m0_to_int(x: torch.Tensor) -> torch.Tensor:
    """fp32 powers of two (..., 4w) -> int32 (..., w), row-major; the lowest byte is the first.

    Raises:
        ValueError: the last size is not a multiple of 4, or a value is not a power of two.
    """
    op = "pack_ue8m0_to_int"
    dtype(op, "x", x, [torch.float32], "Convert it with .float().")
    rule, fix = "in fours along the last dimension", "Pad it with ones."
    require(x.size(-1) % 4 == 0, op, "x", rule, x.size(-1), fix)
    bits = x.contiguous().view(torch.int32)
    bad = ((bits < 0) | (bits & 0x7FFFFF).ne(0)).nonzero()
    if len(bad):
        index = tuple(bad[0].tolist())
        where = f"x[{', '.join(map(str, index))}]"
        fix = "Round it up with ceil_to_ue8m0 before quantising."
        require(False, op, where, "a positive power of two", repr(x[index].item()), fix)
    return (bits >> 23).to(torch.uint8).view(torch.int32)


def unpack_ue8m0_from_int(packed_sf: torch.Tensor) -> torch.Tensor:
    """int32 (..., w) -> fp32 (..., 4w). Byte 0 becomes 0.0 and byte 255 inf, as in the library."""
    return (packed_sf.contiguous().view(torch.uint8).int() << 23).view(torch.float32)


def _scale(amax: torch.Tensor, top: float, use_ue8m0: bool) -> torch.Tensor:
    scale = amax.float().clamp_min(_FLOOR) / top
    return ceil_to_ue8m0(scale) if use_ue8m0 else scale


def _groups(x: torch.Tensor, gran_k: int) -> torch.Tensor:
    """(m, n) -> (m, groups, gran_k), padded with zeros."""
    padding = align(x.size(1), gran_k) - x.size(1)
    return torch.nn.functional.pad(x, (0, padding)).unflatten(1, (-1, gran_k))


def _finish_scale(sf: torch.Tensor, packed: bool) -> torch.Tensor:
    """As is, or packed after a pad with ones to whole words."""
    if not packed:
        return sf
    padding = align(sf.size(1), 4) - sf.size(1)
    return pack_ue8m0_to_int(torch.nn.functional.pad(sf, (0, padding), value=1.0))


def _check_packed(op: str, use_ue8m0: bool, use_packed_ue8m0: bool) -> None:
    ok = use_ue8m0 or not use_packed_ue8m0
    fix = "Only powers of two can be packed."
    require(ok, op, "use_ue8m0", "True with use_packed_ue8m0", use_ue8m0, fix)


def per_token_cast_to_fp8(
    x: torch.Tensor,
    use_ue8m0: bool,
    gran_k: int = 128,
    use_packed_ue8m0: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One scale per row and gran_k columns: x is about q * sf.

    Args:
        x: (m, n) bf16 or fp32.
        use_ue8m0: round the scales up to powers of two, then quantise with those.
        use_packed_ue8m0: four scales a word, padded with ones.

    Returns:
        q: (m, n) e4m3.
        sf: (m, ceil(n / gran_k)) fp32, or (m, ceil(n / gran_k / 4)) int32; row-major.
    """
    op = "per_token_cast_to_fp8"
    rank(op, "x", x, 2, "(m, n)")
    _check_packed(op, use_ue8m0, use_packed_ue8m0)
    groups = _groups(x, gran_k)
    sf = _scale(groups.abs().amax(2), _E4M3_MAX, use_ue8m0)
    q = (groups * (1 / sf[..., None])).to(torch.float8_e4m3fn)
    return q.flatten(1)[:, : x.size(1)].contiguous(), _finish_scale(sf, use_packed_ue8m0)


def per_channel_cast_to_fp8(
    x: torch.Tensor,
    use_ue8m0: bool,
    gran_k: int = 128,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One scale per column and gran_k rows: (m, n) -> (m, n) e4m3, (m / gran_k, n) fp32."""
    op = "per_channel_cast_to_fp8"
    rank(op, "x", x, 2, "(m, n)")
    rule = f"in whole groups of {gran_k} rows"
    require(x.size(0) % gran_k == 0, op, "x", rule, f"{x.size(0)} rows", "Pad it with zeros.")
    groups = x.unflatten(0, (-1, gran_k))
    sf = _scale(groups.abs().amax(1), _E4M3_MAX, use_ue8m0)
    return (groups * (1 / sf[:, None])).to(torch.float8_e4m3fn).flatten(0, 1), sf


def per_block_cast_to_fp8(
    x: torch.Tensor,
    use_ue8m0: bool,
    gran_k: int = 128,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One scale per gran_k x gran_k block, the last ones cut.

    Args:
        x: (m, n) bf16 or fp32.

    Returns:
        q: (m, n) e4m3.
        sf: (ceil(m / gran_k), ceil(n / gran_k)) fp32.
    """
    rank("per_block_cast_to_fp8", "x", x, 2, "(m, n)")
    m, n = x.shape
    pad = (0, align(n, gran_k) - n, 0, align(m, gran_k) - m)
    blocks = torch.nn.functional.pad(x, pad).unflatten(1, (-1, gran_k)).unflatten(0, (-1, gran_k))
    sf = _scale(blocks.abs().amax((1, 3)), _E4M3_MAX, use_ue8m0)
    q = (blocks * (1 / sf[:, None, :, None])).to(torch.float8_e4m3fn)
    return q.flatten(0, 1).flatten(1)[:m, :n].contiguous(), sf


def per_custom_dims_cast_to_fp8(
    x: torch.Tensor,
    dims: tuple[int, ...],
    use_ue8m0: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One scale per index of `dims`, shared along all others; sizes of 1 are squeezed from sf."""
    shared = [axis for axis in range(x.dim()) if axis not in dims]
    sf = _scale(x.abs().amax(shared, keepdim=True), _E4M3_MAX, use_ue8m0)
    return (x * (1 / sf)).to(torch.float8_e4m3fn), sf.squeeze()


def _e2m1_codes(x: torch.Tensor) -> torch.Tensor:
    """Nearest code 0..7, ties to the even code, plus 8 for negatives that are not zero; uint8."""
    size = x.abs()
    code = torch.zeros_like(x, dtype=torch.uint8)
    for index, midpoint in enumerate(_E2M1_MIDPOINTS):
        # Between codes i and i + 1 a tie goes up exactly when i is odd.
        code += size >= midpoint if index % 2 else size > midpoint
    return code | ((x < 0) & (code != 0)).to(torch.uint8) << 3


def _pair(codes: torch.Tensor) -> torch.Tensor:
    """uint8 codes (m, n) -> int8 (m, n / 2): the even column is the low nibble."""
    return (codes[:, ::2] | codes[:, 1::2] << 4).contiguous().view(torch.int8)


def _split(packed: torch.Tensor) -> torch.Tensor:
    """int8 (m, n / 2) -> uint8 codes (m, n)."""
    byte = packed.contiguous().view(torch.uint8)
    return torch.stack([byte & 0xF, byte >> 4], -1).flatten(1)


def per_token_cast_to_fp4(
    x: torch.Tensor,
    use_ue8m0: bool,
    gran_k: int = 128,
    use_packed_ue8m0: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One scale per row and gran_k columns, values e2m1, two to a byte.

    Args:
        x: (m, n) bf16 or fp32, n even.

    Returns:
        q: (m, n / 2) int8, low nibble = even column.
        sf: as per_token_cast_to_fp8.
    """
    op = "per_token_cast_to_fp4"
    rank(op, "x", x, 2, "(m, n)")
    require(x.size(1) % 2 == 0, op, "x", "of even width", x.size(1), "Pad it with zeros.")
    _check_packed(op, use_ue8m0, use_packed_ue8m0)
    groups = _groups(x, gran_k)
    sf = _scale(groups.abs().amax(2), _E2M1_MAX, use_ue8m0)
    codes = _e2m1_codes(groups * (1 / sf[..., None])).flatten(1)[:, : x.size(1)]
    return _pair(codes), _finish_scale(sf, use_packed_ue8m0)


def transpose_packed_fp4(a: torch.Tensor) -> torch.Tensor:
    """int8 (m, n / 2), pairs along n -> int8 (n, m / 2), pairs along m."""
    op = "transpose_packed_fp4"
    rank(op, "a", a, 2, "(m, n / 2)")
    dtype(op, "a", a, [torch.int8], "View it with .view(torch.int8).")
    require(a.size(0) % 2 == 0, op, "a", "of even height", a.size(0), "Pad it with zeros.")
    return _pair(_split(a).mT)


def _columns(sf: torch.Tensor, n: int, gran_k: int, packed: bool) -> torch.Tensor:
    sf = unpack_ue8m0_from_int(sf) if packed else sf
    return sf.repeat_interleave(gran_k, 1)[:, :n]


def cast_back_from_fp4(
    packed: torch.Tensor,
    sf: torch.Tensor,
    gran_k: int = 128,
    use_packed_ue8m0: bool = False,
) -> torch.Tensor:
    """Undoes per_token_cast_to_fp4: fp32 (m, n)."""
    codes = _split(packed).int()
    value = torch.tensor(_E2M1, device=packed.device)[codes & 7]
    value = torch.where((codes > 8), -value, value)
    return value * _columns(sf, value.size(1), gran_k, use_packed_ue8m0)


def cast_back_from_fp8(
    x_fp8: torch.Tensor,
    sf: torch.Tensor,
    gran_k: int = 128,
    use_packed_ue8m0: bool = False,
) -> torch.Tensor:
    """Undoes per_token_cast_to_fp8: fp32 (m, n)."""
    return x_fp8.float() * _columns(sf, x_fp8.size(1), gran_k, use_packed_ue8m0)
