"""prepare_weights explains itself: one bad argument at a time, the whole sentence."""

import re

import pytest
import torch

from moe_ops import prepare_weights

W13, W2 = torch.randn(2, 256, 128), torch.randn(2, 128, 128)
Q13, Q2 = W13.to(torch.float8_e4m3fn), W2.to(torch.float8_e4m3fn)
S13, S2 = torch.ones(2, 2, 1), torch.ones(2, 1, 1)
BLOCK = dict(w13=Q13, w2=Q2, w13_scale=S13, w2_scale=S2, source="fp8_block")

BAD = {
    "recipe": (
        dict(recipe="fp8"),
        ValueError,
        "prepare_weights: recipe must be one of bf16, fp8_block, mxfp8, mxfp4; got 'fp8'. Choose one of them.",
    ),
    "axes": (
        dict(w13=W13[0]),
        ValueError,
        "prepare_weights: w13 must be of 3 axes (E, N, K); got (256, 128). Stack the experts.",
    ),
    "dtype": (
        dict(w2=W2.to(torch.float8_e5m2)),
        TypeError,
        "prepare_weights: w2 must be bfloat16 or float16 or float32 or float8_e4m3fn or int8 or uint8 or "
        "float4_e2m1fn_x2; got float8_e5m2. Weights come in these.",
    ),
    "shape": (
        dict(w13=W13[:, :, :64]),
        ValueError,
        "prepare_weights: w13 must be of shape (E, 2 I, K) = (2, 256, 128); got (2, 256, 64). "
        "E, I and K are those of w2.",
    ),
    "experts": (
        dict(w2=torch.randn(3, 128, 128)),
        ValueError,
        "prepare_weights: w2 must be of E=2 experts; got 3. As many as w13 has.",
    ),
    "scale of floats": (
        dict(w13_scale=S13),
        ValueError,
        "prepare_weights: w13_scale must be None for float weights; got a tensor. Drop it.",
    ),
    "scale missing": (
        dict(w13=Q13, w2=Q2),
        ValueError,
        "prepare_weights: w13_scale must be given beside quantised weights; got None. Pass it.",
    ),
    "scale of w2 missing": (
        BLOCK | dict(w2_scale=None),
        ValueError,
        "prepare_weights: w2_scale must be given beside quantised weights; got None. Pass it.",
    ),
    "scale shape": (
        BLOCK | dict(w13_scale=torch.ones(2, 3, 1)),
        ValueError,
        "prepare_weights: w13_scale must be of shape (E, rows, groups) of fp8_block = (2, 2, 1); got (2, 3, 1). "
        "Each half of w13 has its own rows of scales.",
    ),
    "scale dtype": (
        BLOCK | dict(w13_scale=S13.half()),
        TypeError,
        "prepare_weights: w13_scale must be float32 or bfloat16 or float8_e8m0fnu; got float16. "
        "Scales of fp8_block come in these.",
    ),
    "scale NaN": (
        BLOCK | dict(w2_scale=S2 * float("nan")),
        ValueError,
        "prepare_weights: w2_scale must be finite and at least 0; got nan at (0, 0, 0). The file is damaged.",
    ),
    "per tensor": (
        dict(w13=Q13, w2=Q2, w13_scale=torch.ones(3), w2_scale=torch.ones(2), source="fp8_tensor"),
        ValueError,
        "prepare_weights: w13_scale must be of shape (E,) = (2,); got (3,). One scale an expert; w13 may have (E, 2).",
    ),
    "on_inexact": (
        dict(on_inexact="ignore"),
        ValueError,
        "prepare_weights: on_inexact must be one of raise, warn; got 'ignore'. Choose one of them.",
    ),
    "arch": (
        dict(arch="sm80"),
        ValueError,
        "prepare_weights: arch must be one of cpu, sm90, sm100, sm120; got 'sm80'. Choose one of them.",
    ),
    "bias": (
        dict(w13_bias=torch.zeros(2, 255)),
        ValueError,
        "prepare_weights: w13_bias must be of shape (E, columns) = (2, 256); got (2, 255). One row an expert.",
    ),
}


@pytest.mark.parametrize("change, error, sentence", BAD.values(), ids=list(BAD))
def test_prepare_weights_explains_itself(change, error, sentence):
    arguments = dict(w13=W13, w2=W2, recipe="fp8_block") | change
    with pytest.raises(error, match=f"^{re.escape(sentence)}$"):
        prepare_weights(**arguments)


def test_prepare_weights_does_not_change_its_inputs():
    before = Q13.view(torch.uint8).clone(), S13.clone()
    made = prepare_weights(**BLOCK)
    made.w13.view(torch.uint8).zero_()
    assert made.w13_scale is not None
    made.w13_scale.zero_()
    assert torch.equal(Q13.view(torch.uint8), before[0]) and torch.equal(S13, before[1])
