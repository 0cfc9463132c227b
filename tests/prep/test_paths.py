"""Each preparation path: what must not change does not change by a bit, and what changes is reported as measured."""

import pytest
import torch

from moe_ops import prepare_weights
from moe_ops.testing import assert_bits_equal
from moe_ops.testing.checkpoints import Truth, added_error, meaning
from moe_ops.testing.decode import decode_e4m3
from moe_ops.testing.encode import (
    decode_block,
    decode_mx,
    encode_block,
    encode_mx,
    encode_rows,
    encode_tensor,
)

E, K, I = 2, 512, 256


def floats(E=E, K=K, I=I) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(E, 2 * I, K) / K**0.5, torch.randn(E, K, I) / I**0.5


def mx(dtype: str, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(values, exponent bytes, meaning)."""
    values, scale = encode_mx(w, dtype)
    return values, scale, decode_mx(values, scale, dtype)


def each(encode, decode, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(values, scales, meaning) of experts encoded one by one."""
    pairs = [encode(expert) for expert in w]
    values, scales = (torch.stack(part) for part in zip(*pairs, strict=True))
    return values, scales, torch.stack([decode(v, s) for v, s in pairs])


def blocks(w, **more):
    return each(lambda x: encode_block(x, (128, 128), **more), lambda v, s: decode_block(v, s, (128, 128)), w)


def same(got: Truth, want: Truth) -> None:
    assert_bits_equal(got.w13, want.w13, "w13")
    assert_bits_equal(got.w2, want.w2, "w2")


@pytest.mark.parametrize("scales", [torch.uint8, torch.float8_e8m0fnu, torch.float32])
@pytest.mark.parametrize("codes", [torch.uint8, torch.int8, torch.float4_e2m1fn_x2])
def test_path_a_keeps_mxfp4(codes, scales):
    w13, w2 = floats()
    (q13, s13, d13), (q2, s2, d2) = mx("e2m1", w13), mx("e2m1", w2)
    as_scale = (lambda s: torch.exp2(s.double() - 127).float()) if scales == torch.float32 else lambda s: s.view(scales)
    made = prepare_weights(
        q13.view(codes), q2.view(codes), w13_scale=as_scale(s13), w2_scale=as_scale(s2), recipe="mxfp4"
    )
    assert_bits_equal(made.w13, q13.view(torch.int8))
    assert made.w13_scale is not None and made.w2_scale is not None
    assert made.w13_scale.shape == (E, 2 * I, K // 128) and made.w13_scale.stride() == (2 * I * K // 128, 1, 2 * I)
    assert made.w2_scale.dtype == torch.int32 and made.w2_scale.shape == (E, K, I // 128)
    same(meaning(made), Truth(d13, d2))
    assert made.report is not None and (made.report.path, made.report.relative_error) == ("mxfp4", 0.0)


@pytest.mark.parametrize("scale_format", ["fp32", "ue8m0"])
def test_path_b_is_exact_where_the_span_allows(scale_format):
    w13, w2 = floats()
    (q13, s13, d13), (q2, s2, d2) = mx("e2m1", w13), mx("e2m1", w2)
    made = prepare_weights(
        q13, q2, w13_scale=s13, w2_scale=s2, recipe="fp8_block", scale_format=scale_format, arch="sm90"
    )
    same(meaning(made), Truth(d13, d2))
    assert made.report is not None
    assert (made.report.inexact_tiles, made.report.tiles) == (0, E * (2 * I * K + K * I) // 128**2)


def one_tile(bytes_: dict[int, int], code: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """MXFP4 of one 128 x 128 tile, every value `code`, exponent bytes 127 but for the rows given."""
    codes = torch.full((1, 128, 64), code * 17, dtype=torch.uint8)
    scale = torch.full((1, 128, 4), 127, dtype=torch.uint8)
    for row, byte in bytes_.items():
        scale[0, row] = byte
    return codes, scale


@pytest.mark.parametrize(
    "byte, code, exact",
    [
        (127 - 14, 1, True),  # 0.5 * 2^-14 against 2^0: the smallest subnormal of e4m3
        (127 - 15, 1, False),
        (127 - 15, 2, True),  # 1.0 * 2^-15 is the same number
        (127 - 14, 7, True),
        (127 - 16, 7, True),  # 6 * 2^-16 is three of them
        (127 - 17, 7, False),
    ],
)
def test_path_b_checks_the_span_of_each_tile(byte, code, exact):
    codes, scale = one_tile({5: byte}, code)
    w13, s13 = codes.repeat(1, 2, 1), scale.repeat(1, 2, 1)
    arguments = dict(w13_scale=s13, w2_scale=torch.full_like(scale, 127), recipe="fp8_block")
    want = Truth(decode_mx(w13, s13, "e2m1"), decode_mx(codes, arguments["w2_scale"], "e2m1"))
    if exact:
        same(meaning(prepare_weights(w13, codes, **arguments)), want)
        return
    with pytest.raises(ValueError) as caught:
        prepare_weights(w13, codes, **arguments)
    assert str(caught.value) == (
        "prepare_weights: the weights must be exact as fp8 in 128 x 128 tiles; got 1 of 1 tiles that round in gate of "
        "expert 0. Pass on_inexact='warn' to take the loss, or recipe='mxfp4' to keep the weights as they are."
    )
    with pytest.warns(UserWarning, match="inexact tiles 2 of 3"):
        made = prepare_weights(w13, codes, **arguments, on_inexact="warn")
    assert made.report is not None and made.report.inexact_tiles == 2
    error = added_error(meaning(made), want)
    assert 0 < made.report.relative_error == pytest.approx(error, rel=1e-6)


def test_path_b_ignores_the_scales_of_zero_groups():
    """A zero group says nothing about the tile's range, whatever its exponent; an all-zero tile gets scale 1."""
    codes, scale = one_tile({0: 254, 1: 0})
    codes[0, :2] = 0
    w13, s13 = torch.cat((codes, torch.zeros_like(codes)), 1), scale.repeat(1, 2, 1)
    made = prepare_weights(w13, codes, w13_scale=s13, w2_scale=scale, recipe="fp8_block")
    same(meaning(made), Truth(decode_mx(w13, s13, "e2m1"), decode_mx(codes, scale, "e2m1")))
    assert made.w13_scale is not None and made.w13_scale.flatten().tolist() == [2.0**-6, 1.0]


@pytest.mark.parametrize("byte", [0, 3, 254])
def test_path_b_at_the_ends_of_the_exponent_range(byte):
    codes, scale = one_tile({}, 7)
    scale[:] = byte
    made = prepare_weights(
        codes.repeat(1, 2, 1), codes, w13_scale=scale.repeat(1, 2, 1), w2_scale=scale, recipe="fp8_block"
    )
    assert_bits_equal(meaning(made).w2, decode_mx(codes, scale, "e2m1"))


def test_path_c_reports_the_error_it_adds():
    w13, w2 = floats()
    (q13, s13, d13), (q2, s2, d2) = blocks(w13), blocks(w2)
    arguments = dict(w13_scale=s13, w2_scale=s2, recipe="fp8_block")
    kept = prepare_weights(q13, q2, **arguments, scale_format="fp32")
    same(meaning(kept), Truth(d13, d2))
    made = prepare_weights(q13, q2, **arguments, scale_format="ue8m0")
    assert made.report is not None and made.report.path == "requantise"
    error = added_error(meaning(made), Truth(d13, d2))
    assert made.report.relative_error == pytest.approx(error, rel=1e-6) and 0.01 < error < 0.03


def test_path_c_leaves_blocks_with_powers_of_two_alone():
    w13, w2 = floats()
    (q13, s13, d13), (q2, s2, d2) = blocks(w13, powers_of_two=True), blocks(w2, powers_of_two=True)
    made = prepare_weights(q13, q2, w13_scale=s13, w2_scale=s2, recipe="fp8_block", scale_format="ue8m0")
    assert_bits_equal(made.w13, q13)
    same(meaning(made), Truth(d13, d2))
    assert made.report is not None and made.report.relative_error == 0

    s13[1, 0, 0] *= 1.25
    d13[1, :128, :128] *= 1.25
    mixed = prepare_weights(q13, q2, w13_scale=s13, w2_scale=s2, recipe="fp8_block", scale_format="ue8m0")
    assert_bits_equal(mixed.w13[0], q13[0])
    assert_bits_equal(mixed.w13[1, 128:], q13[1, 128:])
    assert mixed.report is not None
    error = added_error(meaning(mixed), Truth(d13, d2))
    assert 0 < mixed.report.relative_error == pytest.approx(error, rel=1e-6)


@pytest.mark.parametrize("scales", [torch.uint8, torch.float8_e8m0fnu, torch.float32])
def test_path_d_keeps_mxfp8(scales):
    w13, w2 = floats()
    (q13, s13, d13), (q2, s2, d2) = mx("e4m3", w13), mx("e4m3", w2)
    as_scale = (lambda s: torch.exp2(s.double() - 127).float()) if scales == torch.float32 else lambda s: s.view(scales)
    made = prepare_weights(q13, q2, w13_scale=as_scale(s13), w2_scale=as_scale(s2))
    assert made.recipe == "mxfp8"
    assert_bits_equal(made.w13, q13)
    same(meaning(made), Truth(d13, d2))


@pytest.mark.parametrize("dtype, recipe", [("e4m3", "mxfp8"), ("e2m1", "mxfp4")])
def test_path_d_from_bf16_is_the_declared_rounding(dtype, recipe):
    """Scale: amax / top rounded up to a power of two; values: nearest even. The independent encoder agrees."""
    w13, w2 = (w.bfloat16() for w in floats())
    made = prepare_weights(w13, w2, recipe=recipe)
    same(meaning(made), Truth(mx(dtype, w13)[2], mx(dtype, w2)[2]))
    assert made.report is not None
    error = added_error(meaning(made), Truth(w13.double(), w2.double()))
    assert made.report.relative_error == pytest.approx(error, rel=1e-6)


def test_path_mxfp4_widens_to_mxfp8_without_loss():
    w13, w2 = floats()
    (q13, s13, d13), (q2, s2, d2) = mx("e2m1", w13), mx("e2m1", w2)
    made = prepare_weights(q13, q2, w13_scale=s13, w2_scale=s2, recipe="mxfp8")
    same(meaning(made), Truth(d13, d2))


@pytest.mark.parametrize("halves", [False, True], ids=["one_scale", "gate_and_up_scale"])
def test_path_e_expands_per_tensor_scales(halves):
    w13, w2 = floats()
    q2, s2, d2 = each(encode_tensor, lambda v, s: decode_e4m3(v) * s.double(), w2)
    if halves:
        q13, s13, d13 = each(encode_tensor, lambda v, s: decode_e4m3(v) * s.double(), w13.reshape(2 * E, I, K))
        q13, s13, d13 = q13.view(E, 2 * I, K), s13.view(E, 2), d13.view(E, 2 * I, K)
    else:
        q13, s13, d13 = each(encode_tensor, lambda v, s: decode_e4m3(v) * s.double(), w13)
    made = prepare_weights(q13, q2, w13_scale=s13, w2_scale=s2, scale_format="fp32")
    assert_bits_equal(made.w13, q13)
    same(meaning(made), Truth(d13, d2))
    packed = prepare_weights(q13, q2, w13_scale=s13, w2_scale=s2, scale_format="ue8m0")
    error = added_error(meaning(packed), Truth(d13, d2))
    assert packed.report is not None and packed.report.relative_error == pytest.approx(error, rel=1e-6)
    assert 0.01 < error < 0.03


@pytest.mark.parametrize("scale_format", ["fp32", "ue8m0"])
def test_path_e_requantises_per_channel_scales(scale_format):
    w13, w2 = floats()
    w13 = w13 * torch.exp2(2 * torch.randn(E, 2 * I, 1))
    (q13, s13, d13), (q2, s2, d2) = (each(encode_rows, lambda v, s: decode_e4m3(v) * s.double(), w) for w in (w13, w2))
    for squeeze in (False, True):
        scales = dict(w13_scale=s13[..., 0] if squeeze else s13, w2_scale=s2[..., 0] if squeeze else s2)
        made = prepare_weights(q13, q2, **scales, scale_format=scale_format)
        assert made.recipe == "fp8_block"
        error = added_error(meaning(made), Truth(d13, d2))
        assert made.report is not None and made.report.relative_error == pytest.approx(error, rel=1e-6)


@pytest.mark.parametrize("block, exact", [((256, 128), True), ((64, 64), False), ((1, 128), False)])
def test_fp8_of_other_block_sizes(block, exact):
    w13, w2 = floats()
    made = {}
    for name, w in (("w13", w13), ("w2", w2)):
        made[name] = each(lambda x: encode_block(x, block), lambda v, s: decode_block(v, s, block), w)
    scales = dict(w13_scale=made["w13"][1], w2_scale=made["w2"][1])
    weights = prepare_weights(made["w13"][0], made["w2"][0], **scales, source="fp8_block", block=block)
    error = added_error(meaning(weights), Truth(made["w13"][2], made["w2"][2]))
    assert weights.report is not None and weights.report.relative_error == pytest.approx(error, rel=1e-6)
    assert (error == 0) == exact


@pytest.mark.parametrize("recipe", ["bf16", "fp8_block", "mxfp8", "mxfp4"])
def test_any_source_reaches_any_recipe(recipe):
    w13, w2 = floats()
    for encode in (lambda w: mx("e2m1", w), lambda w: mx("e4m3", w), blocks):
        (q13, s13, d13), (q2, s2, d2) = encode(w13), encode(w2)
        made = prepare_weights(q13, q2, w13_scale=s13, w2_scale=s2, recipe=recipe)
        error = added_error(meaning(made), Truth(d13, d2))
        assert made.report is not None and made.report.relative_error == pytest.approx(error, rel=1e-5, abs=1e-9)
        assert error < (0.2 if recipe == "mxfp4" else 0.04)
