"""MXFP4 weights repacked for sm_90 and back: every bit, the format that is chosen, and what is refused."""

import pytest
import torch

from moe_ops.meta.grouped_gemm import weight_scale_spec
from moe_ops.prep.repack import repack, restore, spans
from moe_ops.recipes import RECIPES
from moe_ops.testing import assert_bits_equal
from moe_ops.testing.decode import decode_e4m3, decode_weight
from moe_ops.weight_format import FORMATS, SPAN

E, N, K = 2, 128, 256
MXFP4 = RECIPES["mxfp4"]
REPACKED = [row.name for row in FORMATS.values() if row.repacked]


def natural(exponent, k=K):
    """Random codes under exponents that broadcast to (E, N, k / 32)."""
    w = torch.randint(0, 256, (E, N, k // 2), dtype=torch.uint8)
    w[:, :, ::16] |= 0x11  # no group is all zeros
    scale = weight_scale_spec(E, N, k, MXFP4, "ue8m0").empty("cpu")
    byte = torch.as_tensor(exponent).expand(E, N, k // 32).to(torch.uint8).contiguous()
    return w.view(torch.int8), scale.copy_(byte.view(torch.int32))


def steps(span):
    """Exponents of a row that rise from 100 by `span` in all."""
    return 100 + torch.linspace(0, span, K // 32).round()


@pytest.mark.parametrize("name", REPACKED)
@pytest.mark.parametrize("k", [128, 256, 640])
def test_there_and_back(name, k):
    w, scale = natural(torch.randint(100, 100 + SPAN + 1, (E, N, k // 32)), k=k)
    packed = repack(w, scale, name)
    assert packed.w.nbytes == w.nbytes and packed.w_scale.nbytes == scale.nbytes
    assert packed.w_scale.shape == scale.shape and packed.w_scale.stride() == scale.stride()
    again, scale_again = restore(*packed)
    assert_bits_equal(again, w, "codes")
    assert_bits_equal(scale_again, scale, "scales")
    assert scale_again.stride() == scale.stride()


@pytest.mark.parametrize("byte", [0, 1, 254])
def test_extreme_exponents_come_back(byte):
    for name in REPACKED:
        w, scale = natural(byte)
        assert_bits_equal(restore(*repack(w, scale, name))[1], scale, name)


@pytest.mark.parametrize("name", ["sm90_block", "sm90_row"])
def test_words_hold_what_the_format_says(name):
    """Element by element from the description in weight_format.py: tables in e4m3, selectors, signs, nibbles, tops."""
    exponent = torch.randint(100, 106, (E, N, K // 32))
    exponent += 6 * (torch.arange(K // 32) // 4) if name == "sm90_block" else 0
    w, scale = natural(exponent)
    packed = repack(w, scale, name)
    words = packed.w.view(torch.int32).long() % 2**32
    for e, n, k in [(0, 0, 0), (1, 5, 31), (0, 9, 32), (1, 127, 63), (0, 64, 100), (1, 1, 255), (0, 77, 161)]:
        half, column = divmod(k % 64, 32)
        word = int(words[e, k // 64, n, column // 4])
        index = word >> 16 * half + 4 * (column % 4) & 7
        sign = word >> 8 * (column % 4) + (3 if half else 7) & 1
        note = int(packed.w_scale[e, n, k // 128])
        nibble, top = note >> 4 * (k // 32 % 4) & 15, note >> 23
        table = (0x00, 0x08, 0x10, 0x14, 0x18, 0x1C, 0x20, 0x24)[index]
        code = table + 8 * nibble if index else 0
        value = float(decode_e4m3(torch.tensor([code], dtype=torch.uint8))) * 2.0 ** (top - 127 + 5 - SPAN)
        assert (-value if sign else value) == decode_weight(w, scale, MXFP4)[e, n, k]
    tops = packed.w_scale >> 23
    assert (tops == tops[:, :, :1]).all() == (name == "sm90_row")


@pytest.mark.parametrize(
    "exponent, block, row, name",
    [
        (steps(SPAN), 5, 11, "sm90_row"),
        (steps(SPAN + 1), 5, 12, "sm90_block"),
        (torch.tensor([0, 11, 0, 0, 60, 71, 60, 60]) + 90, 11, 71, "sm90_block"),
        (torch.tensor([0, 12, 0, 0, 1, 1, 1, 1]) + 90, 12, 12, "sm90_group"),
        (torch.tensor([0, 70, 0, 70, 0, 70, 0, 70]) + 92, 70, 70, "sm90_group"),
    ],
)
def test_the_span_chooses_the_format(exponent, block, row, name):
    w, scale = natural(100)
    some = scale[1, 7].clone()
    scale[1, 7] = exponent.to(torch.uint8).view(torch.int32)  # one row of one expert decides
    assert spans(w, scale) == (block, row)
    assert repack(w, scale).weight_format == name
    scale[1, 7] = some
    assert repack(w, scale).weight_format == "sm90_row"


def test_groups_of_zeros_do_not_count():
    w, scale = natural(torch.tensor([0, 100, 105, 200, 100, 100, 254, 111]))
    for group in (0, 3, 6):
        w[:, :, 16 * group : 16 * group + 16] = torch.tensor([0, 8, -128, -120]).repeat(4)  # zeros of both signs
    w[1, 3] = 0  # and a row of nothing else
    packed = repack(w, scale)
    assert packed.weight_format == "sm90_row" and spans(w, scale) == (11, 11)
    again, scale_again = restore(*packed)
    assert_bits_equal(again, w)
    assert_bits_equal(decode_weight(again, scale_again, MXFP4), decode_weight(w, scale, MXFP4))


def test_no_experts():
    w, scale = natural(100)
    packed = repack(w[:0], scale[:0])
    assert packed.w.shape == (0, K // 64, N, 32) and packed.weight_format == "sm90_row"


def test_it_explains_itself():
    w, scale = natural(steps(SPAN + 1))
    damaged = natural(100)[1]
    damaged[1, 3, 1] = 0x64FF6464
    calls = [
        (dict(weight_format="sm90_row"), "w_scale must be within 11 powers of two in each row; got a span of 12"),
        (dict(weight_format="natural"), "weight_format must be one of auto, sm90_group, sm90_block, sm90_row"),
        (dict(w_scale=damaged), "w_scale must be .* 0 to 254; got 255 in expert 1, row 3, group 6"),
        (dict(w=w[:, :64]), "N, the rows of w, must be a multiple of 128; got 64"),
        (dict(w=w[..., :96]), "K of w must be a multiple of 128; got 192"),
        (dict(w_scale=scale[..., :1]), r"w_scale must be of shape \(E, N, K / 128\)"),
        (dict(w=w[0]), r"w must be of shape \(E, N, K / 2\)"),
        (dict(w=w.short()), "w must be int8; got int16"),
        (dict(w_scale=scale.float()), "w_scale must be int32; got float32"),
    ]
    for change, text in calls:
        with pytest.raises(TypeError if "int" in text else ValueError, match=f"^repack: {text}.*\\. "):
            repack(**dict(w=w, w_scale=scale) | change)
    with pytest.raises(ValueError, match="^restore: weight_format must be one of sm90_group, sm90_block, sm90_row"):
        restore(*repack(w, scale)[:2], "natural")
