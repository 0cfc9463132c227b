"""Reference of moe::quantize, and the conversions that the other references share.

One rule everywhere: the scale is fixed (rounded up to a power of two if the format asks for it) before any value is
divided by it, so that what is stored times its scale is the nearest the format can say. Arithmetic is float32.
"""

from functools import lru_cache

import torch

from moe_ops.recipes import Recipe
from moe_ops.rows import align, ceil_div

E4M3_MAX = 448.0
E2M1_MAX = 6.0
AMAX_FLOOR = 1e-10  # an all-zero group gets a finite scale and zeros

# Exponent byte -> 2^(byte - 127); 255 is NaN. Byte 0 is the subnormal 2^-127.
_E8M0 = tuple(2.0 ** (byte - 127) for byte in range(255)) + (float("nan"),)
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
# Halfway points between neighbours: those that round down (to the even code) and those that round up.
_E2M1_TIES_DOWN = (0.25, 1.25, 2.5, 5.0)
_E2M1_TIES_UP = (0.75, 1.75, 3.5)


@lru_cache
def _table(values: tuple[float, ...], device: torch.device) -> torch.Tensor:
    """float32, made at first use: at import, a model loader may have set a default dtype or device of its own."""
    return torch.tensor(values, dtype=torch.float32, device=device)


def exponent_byte(scale: torch.Tensor) -> torch.Tensor:
    """The UE8M0 byte of each positive float32 scale, rounded up to a power of two: uint8."""
    bits = scale.float().contiguous().view(torch.int32)
    up = (bits & 0x7FFFFF) != 0
    return ((bits >> 23) + up.int()).clamp(1, 254).to(torch.uint8)


def byte_value(byte: torch.Tensor) -> torch.Tensor:
    """2^(byte - 127) as float32."""
    return _table(_E8M0, byte.device)[byte.long()]


def group_scale(amax: torch.Tensor, top: float, scale_format: str) -> torch.Tensor:
    """The float32 scale that maps |x| <= amax into [-top, top]; a power of two for ue8m0."""
    scale = amax.clamp(min=AMAX_FLOOR) * (1.0 / top)
    return byte_value(exponent_byte(scale)) if scale_format == "ue8m0" else scale


def to_e4m3(values: torch.Tensor) -> torch.Tensor:
    """Nearest even, saturating. e4m3fn has no infinity: what is not finite becomes NaN and stays visible."""
    finite = values.clamp(-E4M3_MAX, E4M3_MAX).masked_fill(~values.isfinite(), float("nan"))
    return finite.to(torch.float8_e4m3fn)  # clamped first: torch 2.11 casts 470 to NaN


def to_e2m1(values: torch.Tensor) -> torch.Tensor:
    """Nearest even, saturating, two codes a byte with the even column in the low nibble: int8 (..., K / 2)."""
    magnitude = values.abs().contiguous()
    down, up = _table(_E2M1_TIES_DOWN, values.device), _table(_E2M1_TIES_UP, values.device)
    code = torch.bucketize(magnitude, down) + torch.bucketize(magnitude, up, right=True)
    code = code + 8 * torch.signbit(values)
    return (code[..., 0::2] | code[..., 1::2] << 4).to(torch.uint8).view(torch.int8)


def from_e2m1(packed: torch.Tensor) -> torch.Tensor:
    """float32 (..., K) of packed (..., K / 2)."""
    byte = packed.view(torch.uint8).long()
    return _table(_E2M1, packed.device)[torch.stack((byte & 15, byte >> 4), -1).flatten(-2)]


def amax(values: torch.Tensor, dims: tuple[int, ...]) -> torch.Tensor:
    """Largest finite magnitude: one NaN or infinity does not spoil the scale of its neighbours."""
    magnitude = values.abs()
    return magnitude.masked_fill(~magnitude.isfinite(), 0.0).amax(dims)


def quantize_groups(x: torch.Tensor, group: int, scale_format: str, dtype: str = "e4m3"):
    """(values, float32 scale (..., G)) with one scale per row and `group` columns."""
    grouped = x.float().unflatten(-1, (-1, group))
    top, cast = (E4M3_MAX, to_e4m3) if dtype == "e4m3" else (E2M1_MAX, to_e2m1)
    scale = group_scale(amax(grouped, (-1,)), top, scale_format)
    return cast((grouped / scale[..., None]).flatten(-2)), scale


def quantize_blocks(x: torch.Tensor, block: int, scale_format: str, dtype: str = "e4m3"):
    """(values, float32 scale (..., ceil(M / block), ceil(K / block))) with one scale per square block."""
    *batch, M, K = x.shape
    padded = x.new_zeros((*batch, align(M, block), align(K, block)), dtype=torch.float32)
    padded[..., :M, :K] = x
    tiles = padded.unflatten(-1, (-1, block)).unflatten(-3, (-1, block))  # (..., M / b, b, K / b, b)
    top, cast = (E4M3_MAX, to_e4m3) if dtype == "e4m3" else (E2M1_MAX, to_e2m1)
    scale = group_scale(amax(tiles, (-3, -1)), top, scale_format)
    values = (tiles / scale[..., :, None, :, None]).flatten(-2).flatten(-3, -2)
    return cast(values[..., :M, :K]), scale


def stored(scale: torch.Tensor, scale_format: str) -> torch.Tensor:
    """Logical float32 scales (..., G) as they are stored, strides aside: packed int32 words for ue8m0, else as is."""
    return pack_words(exponent_byte(scale)) if scale_format == "ue8m0" else scale


def pack_words(byte: torch.Tensor) -> torch.Tensor:
    """(..., G) exponent bytes -> (..., ceil(G / 4)) int32, little endian, missing bytes 0."""
    groups = byte.shape[-1]
    padded = byte.new_zeros((*byte.shape[:-1], 4 * ceil_div(groups, 4)))
    padded[..., :groups] = byte
    return padded.view(torch.int32)


def read_scale(scale: torch.Tensor, groups: int) -> torch.Tensor:
    """The float32 scales (..., M, groups) that `stored` made."""
    if scale.dtype == torch.int32:
        shifts = torch.arange(0, 32, 8, device=scale.device)
        return byte_value((scale[..., None] >> shifts & 255).flatten(-2)[..., :groups])
    return scale[..., :groups]


def dequantize_rows(x: torch.Tensor, scale: torch.Tensor | None, recipe: Recipe) -> torch.Tensor:
    """float32 activations (..., K)."""
    if not recipe.quantised:
        return x.float()
    assert scale is not None
    return _scaled(x.float(), read_scale(scale, x.shape[-1] // recipe.x_group), recipe.x_group)


def dequantize_weight(w: torch.Tensor, scale: torch.Tensor | None, recipe: Recipe) -> torch.Tensor:
    """float32 weights (N, K) of one expert."""
    values = from_e2m1(w) if recipe.w_pack == 2 else w.float()
    if not recipe.quantised:
        return values
    assert scale is not None
    rows, columns = recipe.w_block
    factors = read_scale(scale, ceil_div(values.shape[-1], columns))
    if scale.dtype == torch.float32:  # one row of scales per block of rows; ue8m0 has one per row
        factors = factors.repeat_interleave(rows, -2)[: values.shape[-2]]
    return _scaled(values, factors, columns)


def _scaled(values: torch.Tensor, factors: torch.Tensor, group: int) -> torch.Tensor:
    return values * factors.repeat_interleave(group, -1)[..., : values.shape[-1]]


def quantize(outputs, *, x, granularity, group, dtype, scale_format) -> None:
    values_out, scale_out = outputs
    run = quantize_blocks if granularity == "block" else quantize_groups
    values, scale = run(x, group, scale_format, dtype)
    values_out.copy_(values)
    scale_out.copy_(scale if granularity == "block" else stored(scale, scale_format))
