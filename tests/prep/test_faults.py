"""Faults that people reported of weight scales and number formats: each family by a small input that would show it."""

import re

import pytest
import torch

from moe_ops import MoEWeights, pack_scale, prepare_weights, quantize
from moe_ops.arch import READS, runs
from moe_ops.prep import decide
from moe_ops.recipes import RECIPES, get_recipe
from moe_ops.testing import LayerCase, decode_weight, relative_error
from moe_ops.testing.checkpoints import meaning
from moe_ops.testing.encode import encode_tensor

FP8_STEP = 2.0**-4
"""Half a unit in the last of three mantissa bits: the most that one rounding changes a normal e4m3 value."""


def with_amax(ratio: float, E: int = 1, N: int = 256, K: int = 128, top: float = 448.0) -> torch.Tensor:
    """(E, N, K) whose largest magnitude is ratio * 2^-9 * top in every row and group of 32, so its scale that times."""
    w = (torch.rand(E, N, K) * 0.9 + 0.05) * top * ratio * 2.0**-9
    w[..., ::32] = ratio * 2.0**-9 * top
    return w


@pytest.mark.parametrize("recipe, top", [("fp8_block", 448.0), ("mxfp8", 448.0), ("mxfp4", 6.0)])
def test_fault_scale_rounded_up_after_the_values(recipe, top):
    """Values divided by the exact scale and stored beside the rounded one would come back up to twice as large."""
    w13, w2 = with_amax(1.01, top=top), with_amax(1.01, N=128, top=top)
    made = meaning(prepare_weights(w13, w2, recipe=recipe, scale_format="ue8m0"))
    worst = ((made.w13 - w13).abs() / w13.abs()).amax()
    if recipe == "mxfp4":
        # e2m1's spacing below 1 is 0.5 and the scale is twice the exact one: half a spacing of the scaled values
        assert (made.w13 - w13).abs().amax() <= 1.0 * 2.0**-8
    else:
        assert worst <= FP8_STEP


def test_fault_block_scale_rounded_up_without_requantising():
    """Block scales of 1.5 * 2^n: rounding them up alone would inflate the weights by a third."""
    codes = torch.randint(0, 127, (1, 256, 128), dtype=torch.uint8).view(torch.float8_e4m3fn)
    scales = dict(w13_scale=torch.full((1, 2, 1), 1.5 * 2.0**-9), w2_scale=torch.full((1, 1, 1), 1.5 * 2.0**-9))
    before = codes.double() * 1.5 * 2.0**-9
    made = prepare_weights(codes, codes[:, :128], **scales, source="fp8_block", scale_format="ue8m0")
    after = meaning(made).w13
    step = (2.0**-10) * 2.0**-8  # half a subnormal step of the new scale, for values that have no mantissa left
    assert ((after - before).abs() <= FP8_STEP * before.abs() + step).all()


@pytest.mark.parametrize("bad", [1.99, 1.5])
def test_fault_scale_that_is_no_power_of_two_reaches_the_packer(bad):
    scale = torch.full((1, 256, 4), 2.0**-9)
    scale[0, 3, 1:] = bad
    codes = torch.zeros(1, 256, 128).to(torch.float8_e4m3fn)
    sentence = (
        f"prepare_weights: w13_scale must be powers of two; got {torch.tensor(bad).item()!r} at (0, 3, 1). Rounding a "
        "scale would change every value under it: requantise the weights from their float form."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        prepare_weights(codes, codes[:, :128], w13_scale=scale, w2_scale=scale[:, :128])
    with pytest.raises(ValueError, match=re.escape(f"got {torch.tensor(bad).item()!r} at (0, 3, 1)")):
        pack_scale(scale, 256)


def test_fault_per_tensor_scale_expanded_as_raw_fp32():
    """E = 2, scale 0.0137, UE8M0 wanted: the values must be requantised, the packed scales real exponents."""
    w = torch.randn(2, 256, 128)
    codes = torch.stack([encode_tensor(expert)[0] for expert in w])
    scale = torch.tensor([0.0137, 0.0137])
    made = prepare_weights(codes, codes[:, :128], w13_scale=scale, w2_scale=scale, scale_format="ue8m0")
    before = codes.double() * torch.tensor(0.0137).double()
    assert relative_error(meaning(made).w13, before) < 0.03
    assert made.scale_format == "ue8m0" and made.w13_scale is not None and made.w13_scale.dtype == torch.int32


@pytest.mark.parametrize("arch", ["cpu", "sm90", "sm100", "sm120"])
@pytest.mark.parametrize("backend", ["auto", *READS])
def test_fault_preparation_and_run_time_choose_by_two_rules(backend, arch):
    """What is prepared is what the forward finds in the weights: recipe and scale format, and the backend reads it."""
    if backend in READS and arch not in READS[backend]:
        return
    w13, w2 = torch.randn(1, 256, 128), torch.randn(1, 128, 128)
    for recipe in ("bf16", "fp8_block", "mxfp8", "mxfp4"):
        if backend in READS and recipe not in READS[backend][arch]:
            with pytest.raises(NotImplementedError):
                prepare_weights(w13, w2, recipe=recipe, arch=arch, backend=backend)
            continue
        made = prepare_weights(w13, w2, recipe=recipe, arch=arch, backend=backend)
        assert made.scale_format == decide("float", recipe=recipe, device=arch, backend=backend).scale_format
        assert runs(made.recipe, made.scale_format, arch, backend)


def test_fault_scale_kinds_mixed():
    w13, w2 = torch.randn(1, 256, 128), torch.randn(1, 128, 128)
    one = prepare_weights(w13, w2, recipe="fp8_block", scale_format="ue8m0")
    other = prepare_weights(w13, w2, recipe="fp8_block", scale_format="fp32")
    sentence = "MoEWeights: w2_scale must be in format ue8m0; got fp32. Use moe_ops.prepare_weights."
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        MoEWeights(one.w13, one.w13_scale, other.w2, other.w2_scale, "fp8_block", "ue8m0")


def test_fault_requantisation_costs_accuracy_silently():
    codes = torch.randint(0, 127, (1, 256, 128), dtype=torch.uint8).view(torch.float8_e4m3fn)
    scales = dict(w13_scale=torch.full((1, 2, 1), 0.3), w2_scale=torch.full((1, 1, 1), 0.3))
    made = prepare_weights(codes, codes[:, :128], **scales, scale_format="ue8m0", source="fp8_block")
    assert re.search(r"path requantise, .*, error added 0\.0[123]\d*", str(made.report))
    kept = prepare_weights(codes, codes[:, :128], **scales, scale_format="fp32", source="fp8_block")
    assert "error added 0" in str(kept.report).split(", ")


@pytest.mark.parametrize("recipe", ["fp8_block", "mxfp8", "mxfp4"])
def test_fault_fp16_multiplier_overflows(recipe):
    w13, w2 = (torch.rand(1, 256, 128).half() * 1e-3), (torch.rand(1, 128, 128).half() * 1e-3)
    made = meaning(prepare_weights(w13, w2, recipe=recipe, scale_format="ue8m0"))
    assert relative_error(made.w13, w13.double()) < (0.2 if recipe == "mxfp4" else 0.04)


@pytest.mark.parametrize("scale_format", ["fp32", "ue8m0"])
@pytest.mark.parametrize("recipe", ["fp8_block", "mxfp8", "mxfp4"])
def test_fault_all_zero_group(recipe, scale_format):
    """A zero block, a zero row and a zero group: zeros, with finite scales."""
    if scale_format == "fp32" and recipe != "fp8_block":
        return
    w13, w2 = torch.randn(1, 512, 256), torch.randn(1, 256, 256)
    w13[0, :128, :128], w13[0, 200], w13[0, 201, 32:64] = 0, 0, 0
    made = prepare_weights(w13, w2, recipe=recipe, scale_format=scale_format)
    got = meaning(made).w13
    assert got.isfinite().all() and (got[w13 == 0] == 0).all()
    made = prepare_weights(torch.zeros_like(w13), w2, recipe=recipe, scale_format=scale_format)
    assert (meaning(made).w13 == 0).all() and made.report is not None


@pytest.mark.parametrize("K", [512, 1024])
@pytest.mark.parametrize("recipe", ["fp8_block", "mxfp8", "mxfp4"])
def test_fault_layout_hidden_by_packed_width_one(recipe, K):
    case = LayerCase(recipe, "ue8m0", T=9, E=2, K=K, I=256, top_k=1)
    inputs, weights = case.build()
    assert relative_error(case.run(inputs, weights), case.judge(inputs, weights)) <= case.max_diff


@pytest.mark.parametrize("G", [1, 3, 4, 5, 33])
@pytest.mark.parametrize("recipe, group", [("fp8_block", 128), ("mxfp8", 32), ("mxfp4", 32)])
def test_fault_group_count_not_divisible_by_the_word(recipe, group, G):
    K = group * G
    w13, w2 = torch.randn(1, 256, K), torch.randn(1, K, 128)
    made = prepare_weights(w13, w2, recipe=recipe, scale_format="ue8m0")
    assert made.padding.K == -K % get_recipe("test", recipe).granule
    got = meaning(made)
    assert relative_error(got.w13, w13) < (0.2 if recipe == "mxfp4" else 0.04)
    assert relative_error(got.w2, w2) < (0.2 if recipe == "mxfp4" else 0.04)


def test_fault_k_not_a_multiple_of_the_group():
    """Preparation pads it; the op below it names K, the group and the remedy."""
    w13, w2 = torch.randn(1, 256, 48), torch.randn(1, 48, 128)
    made = prepare_weights(w13, w2, recipe="mxfp8")
    assert (made.K, made.padding.K) == (64, 16) and relative_error(meaning(made).w13, w13) < 0.04
    sentence = (
        "quantize: the last axis of x must be a multiple of 32; got 48. Pad it with zeros, or choose a smaller group."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        quantize(w13, group=32)


@pytest.mark.parametrize("ratio", [1.6, 1.75])
@pytest.mark.parametrize("recipe", ["mxfp8", "mxfp4"])
def test_fault_mx_scale_saturates(recipe, ratio):
    """A block whose amax lies just below the next power of two: a floored scale would clip it."""
    w = torch.zeros(1, 256, 128)
    w[..., ::32] = ratio * 2.0**-3
    made = prepare_weights(w, w[:, :128], recipe=recipe)
    got = decode_weight(made.w13, made.w13_scale, get_recipe("test", recipe))[..., ::32]
    assert ((got - ratio * 2.0**-3).abs() <= ratio * 2.0**-3 * (FP8_STEP if recipe == "mxfp8" else 0.2)).all()
    exact = prepare_weights(torch.full_like(w, 1.75), w[:, :128], recipe="mxfp8")
    assert (meaning(exact).w13 == 1.75).all()


def test_fault_nan_scale_in_a_damaged_checkpoint():
    codes = torch.zeros(1, 256, 64, dtype=torch.uint8)
    scale = torch.full((1, 256, 4), 127, dtype=torch.uint8)
    scale[0, 255, 3] = 255
    sentence = (
        "prepare_weights: w13_scale must be exponent bytes from 0 to 254; got 255 at (0, 255, 3). 255 is NaN: the file "
        "is damaged."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        prepare_weights(codes, codes[:, :128], w13_scale=scale, w2_scale=scale[:, :128])


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("recipe", RECIPES)
def test_fault_weights_that_are_not_finite(recipe, bad):
    """e2m1 has no NaN, so a broken checkpoint would turn into plausible numbers: refused for every recipe."""
    w13, w2 = torch.randn(2, 256, 128), torch.randn(2, 128, 128)
    w13[1, 130, 5] = bad
    with pytest.raises(ValueError) as caught:
        prepare_weights(w13, w2, recipe=recipe)
    assert str(caught.value) == (
        "prepare_weights: up of expert 1 must be finite; got NaN or infinity. Check the checkpoint."
    )


@pytest.mark.parametrize("recipe", RECIPES)
def test_fault_parameters_lose_their_history(recipe):
    w13, w2 = torch.nn.Parameter(torch.randn(2, 256, 128)), torch.nn.Parameter(torch.randn(2, 128, 128))
    bias = torch.nn.Parameter(torch.randn(2, 256))
    weights = prepare_weights(w13, w2, recipe=recipe, w13_bias=bias)
    assert not any(t.requires_grad for t in weights.tensors().values() if t is not None)
