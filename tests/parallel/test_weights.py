"""A rank's part of prepared weights is that part of what the whole decodes to, bit for bit."""

import pytest
import torch

from moe_ops.parallel import split_experts, split_intermediate
from moe_ops.recipes import RECIPES
from moe_ops.testing import FORMS, LayerCase, decode_weight

forms = pytest.mark.parametrize("recipe, scale_format", FORMS)


def built(recipe, scale_format, **more):
    _, weights = LayerCase(recipe, scale_format, E=4, K=256, I=256, bias=True, **more).build()
    return weights, RECIPES[recipe]


@forms
def test_split_experts_takes_its_own(recipe, scale_format):
    weights, row = built(recipe, scale_format)
    for rank in range(2):
        part, own = split_experts(weights, rank, 2), slice(2 * rank, 2 * rank + 2)
        assert part.E == 2 and part.w13.data_ptr() == weights.w13[own].data_ptr()
        for name in ("w13", "w2"):
            got = decode_weight(getattr(part, name), getattr(part, f"{name}_scale"), row)
            whole = decode_weight(getattr(weights, name), getattr(weights, f"{name}_scale"), row)
            assert torch.equal(got, whole[own])
        assert torch.equal(part.w13_bias, weights.w13_bias[own]) and torch.equal(part.w2_bias, weights.w2_bias[own])


@forms
def test_split_intermediate_takes_its_columns(recipe, scale_format):
    """Gate and up rows each on their own; scales that share a packed word with another rank's among them."""
    weights, row = built(recipe, scale_format)
    w13 = decode_weight(weights.w13, weights.w13_scale, row)
    w2 = decode_weight(weights.w2, weights.w2_scale, row)
    for rank in range(2):
        part, own = split_intermediate(weights, rank, 2), slice(128 * rank, 128 * rank + 128)
        assert part.I == 128
        gate_up = decode_weight(part.w13, part.w13_scale, row)
        assert torch.equal(gate_up[:, :128], w13[:, :256][:, own])
        assert torch.equal(gate_up[:, 128:], w13[:, 256:][:, own])
        assert torch.equal(decode_weight(part.w2, part.w2_scale, row), w2[:, :, own])
        assert torch.equal(part.w13_bias[:, 128:], weights.w13_bias[:, 256:][:, own])
        assert (part.w2_bias is None) == (rank == 1)


@pytest.mark.parametrize("split", [split_experts, split_intermediate])
def test_split_over_one_rank_changes_nothing(split):
    weights, row = built("fp8_block", "ue8m0")
    part = split(weights, 0, 1)
    for name in ("w13", "w2"):
        got = decode_weight(getattr(part, name), getattr(part, f"{name}_scale"), row)
        assert torch.equal(got, decode_weight(getattr(weights, name), getattr(weights, f"{name}_scale"), row))


def test_splits_explain_themselves():
    weights, _ = built("fp8_block", "fp32")
    with pytest.raises(ValueError, match="^split_experts: E must be a multiple of 3; got 4. Choose a number of ranks"):
        split_experts(weights, 0, 3)
    with pytest.raises(
        ValueError, match="^split_intermediate: I must be a multiple of 512; got 256. Choose fewer ranks"
    ):
        split_intermediate(weights, 0, 4)
    for split in (split_experts, split_intermediate):
        with pytest.raises(ValueError, match=r"rank must be in \[0, 2\); got 2. Ranks count from 0."):
            split(weights, 2, 2)
