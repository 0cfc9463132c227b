"""What travels, byte by byte, and what the receiver makes of it."""

import pytest
import torch

from moe_ops.dispatch.setup import ExpertSetup
from moe_ops.dispatch.wire import Wire
from moe_ops.recipes import RECIPES
from moe_ops.testing import FORMS, decode_rows

ALL = ("bf16", "fp8")
CASES = [(*form, payload) for form in FORMS for payload in (ALL if RECIPES[form[0]].quantised else ("bf16",))]


def wire_of(recipe, scale_format, payload="auto", K=512, group=0, allowed=ALL):
    setup = ExpertSetup(8, 2, K, recipe, scale_format, payload=payload)
    return Wire.of("test", setup, allowed, group)


def decoded(tokens, wire):
    """float64 values of what the experts get."""
    if tokens.scale is None:
        return tokens.x.double()
    exponents = tokens.scale.dtype == torch.uint8
    scale = torch.exp2(tokens.scale.double() - 127) if exponents else tokens.scale.double()
    return tokens.x.double() * scale.repeat_interleave(wire.recipe.x_group, 1)


@pytest.mark.parametrize("N", [0, 1, 5])
@pytest.mark.parametrize("recipe, scale_format, payload", CASES)
def test_wire_gives_what_the_experts_would_have_quantised(recipe, scale_format, payload, N):
    row = RECIPES[recipe]
    wire = wire_of(recipe, scale_format, payload)
    x = (torch.randn(N, 512) * torch.exp2(torch.randint(-9, 9, (N, 512)).float())).bfloat16()
    packet = wire.encode(x)
    assert packet.shape == (N, wire.nbytes) and packet.dtype == torch.uint8
    tokens = wire.decode(packet)
    if not row.quantised:
        assert tokens.scale is None and torch.equal(tokens.x, x)
        return
    values, scale = torch.ops.moe.quantize(x, group=row.x_group, scale_format=scale_format)
    assert torch.equal(tokens.x.view(torch.uint8), values.view(torch.uint8))
    assert torch.equal(decoded(tokens, wire), decode_rows(values, scale, row))


def test_wire_groups_of_128_keep_their_values_in_groups_of_32():
    wire = wire_of("mxfp8", "ue8m0", group=128)
    x = torch.randn(3, 512).bfloat16()
    tokens = wire.decode(wire.encode(x))
    assert tokens.scale is not None and tokens.scale.shape == (3, 16)
    values, words = torch.ops.moe.quantize(x, group=128, scale_format="ue8m0")
    assert torch.equal(decoded(tokens, wire), decode_rows(values, words, RECIPES["fp8_block"]))


def test_wire_bytes():
    """A DeepSeek-V3 token: 7168 values and 56 scales of fp8; twice 7168 bytes of bf16."""
    assert wire_of("fp8_block", "fp32", K=7168).nbytes == 7168 + 4 * 56
    assert wire_of("fp8_block", "ue8m0", K=7168).nbytes == 7168 + 56
    assert wire_of("mxfp8", "ue8m0", K=7168).nbytes == 7168 + 224
    assert wire_of("fp8_block", "fp32", "bf16", K=7168).nbytes == 2 * 7168


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        (
            dict(recipe="bf16", scale_format="none", payload="fp8"),
            "test: payload must be bf16; got fp8. Recipe bf16 computes in bf16; pass payload='bf16'.",
        ),
        (
            dict(recipe="fp8_block", scale_format="fp32", payload="fp8", allowed=("bf16",)),
            "test: payload must be one of bf16; got 'fp8'. That is what this format carries.",
        ),
        (
            dict(recipe="mxfp8", scale_format="ue8m0", K=96, group=128),
            "test: K must be a multiple of 128; got 96. fp8 travels with one scale per 128 columns.",
        ),
    ],
)
def test_wire_explains_itself(arguments, sentence):
    with pytest.raises(ValueError) as caught:
        wire_of(**arguments)
    assert str(caught.value) == sentence
