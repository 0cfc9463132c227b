"""What several Triton kernels compute alike: smooth functions in float32, UE8M0 exponents, quantisation of a tile."""

import triton.language as tl

from moe_ops.kernels.launch import jit


@jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@jit
def fast_sigmoid(x):
    """sigmoid in four instructions, two of them of the special function unit, within a few float32 steps: activations
    at the speed of memory do not have the time for more."""
    return _reciprocal(1.0 + tl.exp2(x * -1.4426950408889634))  # log2(e)


@jit
def _reciprocal(x):
    return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@jit
def tanh(x):
    """Within a few float32 steps: a polynomial near 0, where the closed form cancels."""
    square = x * x
    near = x + x * square * (-1.0 / 3.0 + square * (2.0 / 15.0 - square * (17.0 / 315.0)))
    far = 1.0 - 2.0 / (1.0 + tl.exp(2.0 * tl.abs(x)))
    return tl.where(tl.abs(x) < 0.15, near, tl.where(x < 0.0, -far, far))


@jit
def softplus(x):
    """max(x, 0) + log1p(exp(-|x|)), with log1p(e) = 2 atanh(e / (2 + e)) as a series: log loses small e."""
    e = tl.exp(-tl.abs(x))
    s = e / (2.0 + e)  # at most 1/3
    z = s * s
    series = 1.0 / 9.0 + z * (1.0 / 11.0 + z * (1.0 / 13.0 + z * (1.0 / 15.0)))
    series = 1.0 + z * (1.0 / 3.0 + z * (1.0 / 5.0 + z * (1.0 / 7.0 + z * series)))
    return tl.maximum(x, 0.0) + 2.0 * s * series


@jit
def exponent_byte(scale):
    """The UE8M0 byte of positive float32 scales, rounded up to a power of two: int32."""
    bits = scale.to(tl.int32, bitcast=True)
    byte = (bits >> 23) + ((bits & 0x7FFFFF) != 0).to(tl.int32)
    return tl.minimum(tl.maximum(byte, 1), 254)


@jit
def exponent_value(byte):
    """2^(byte - 127) as float32 of UE8M0 bytes in int32. 0 is a subnormal, 255 is NaN."""
    bits = tl.maximum(byte << 23, 0x400000)
    return tl.where(byte == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)


@jit
def pack_words(byte):
    """(A, 4) exponent bytes in int32 -> (A,) words, byte b in bits 8b to 8b + 7."""
    shift = tl.arange(0, 4) * 8
    return tl.sum(byte << shift[None, :], 1)


@jit
def finite_magnitude(x):
    """|x|, NaN where x is not finite: tl.max passes over it, and one infinity does not spoil its neighbours' scale."""
    return tl.abs(_or_nan(x))


@jit
def group_scale(amax, E2M1: tl.constexpr, UE8M0: tl.constexpr):
    """The float32 scale of values up to amax, for ue8m0 a power of two, and its exponent byte."""
    top: tl.constexpr = 1.0 / 6.0 if E2M1 else 1.0 / 448.0
    scale = tl.maximum(amax, 1e-10) * top  # NaN, where nothing in the group is finite, loses
    byte = exponent_byte(scale)
    if UE8M0:
        scale = exponent_value(byte)
    return scale, byte


@jit
def divided(x, scale, byte, UE8M0: tl.constexpr):
    """x / scale, correctly rounded. A power of two divides exactly by its reciprocal.

    Else one step of Markstein's: with the correctly rounded reciprocal, the quotient's exact remainder corrects it. A
    division an element costs six times as much, which activations at the speed of memory do not have. The remainder is
    taken as quotient * scale - x: the other way round, -0 would become +0.
    """
    if UE8M0:
        return x * exponent_value(254 - byte)
    else:
        reciprocal = tl.div_rn(1.0, scale)
        quotient = x * reciprocal
        return tl.fma(tl.fma(quotient, scale, -x), -reciprocal, quotient)


@jit
def to_e4m3(x):
    """Nearest even, saturating; what is not finite becomes NaN."""
    return _or_nan(x).to(tl.float8e4nv)


@jit
def _or_nan(x):
    """x, NaN where it is not finite, in one instruction."""
    return tl.fma(x, 0.0, x)


@jit
def quantize_groups(x, UE8M0: tl.constexpr):
    """float32 (A, B, GROUP) -> e4m3 values of its shape, (A, B) float32 scales and their exponent bytes."""
    scale, byte = group_scale(tl.max(finite_magnitude(x), 2), False, UE8M0)
    return to_e4m3(divided(x, scale[:, :, None], byte[:, :, None], UE8M0)), scale, byte
