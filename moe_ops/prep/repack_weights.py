"""repack_weights: prepared MXFP4 experts in the form that Hopper's W4A8 kernels read."""

from dataclasses import replace

import torch
from torch import Tensor

from moe_ops import check
from moe_ops.prep.prepare import prepare_weights
from moe_ops.prep.repack import repack
from moe_ops.prep.weights import MoEWeights
from moe_ops.recipes import get_recipe
from moe_ops.weight_format import FORMATS

_OP = "repack_weights"
_BY_GENERALITY = [name for name, form in FORMATS.items() if form.repacked][::-1]  # the one for any scales last


@torch.no_grad()
def repack_weights(weights: MoEWeights, *, fp8: bool = True) -> MoEWeights:
    """Weights for Hopper that take half the bytes of fp8, and half its time while experts have few rows.

    Both matrices get the fastest format whose exponents both can hold (weight_format.FORMATS); nothing is rounded.

    Args:
        weights: recipe mxfp4, natural format. They stay as they are.
        fp8: keep the same values as fp8 blocks beside them, from which calls with more than
            choice.REPACKED_ROWS mean rows an expert are computed: twice the bytes again. False: all calls run from the
            repacked weights, the long ones slower than fp8.

    Raises:
        ValueError: another recipe or format; fp8 and a 128 x 128 tile that fp8 cannot hold without rounding.
    """
    fix = "Others need no repacking."
    packed = get_recipe(_OP, weights.recipe).w_pack == 2
    check.value(packed, _OP, "weights", "of recipe mxfp4", weights.recipe, fix)
    check.value(weights.weight_format == "natural", _OP, "weights", "natural", weights.weight_format, "It was done.")
    scales = (weights.w13_scale, weights.w2_scale)
    assert scales[0] is not None and scales[1] is not None  # MoEWeights checked it
    pairs = [(weights.w13, scales[0]), (weights.w2, scales[1])]
    each = [repack(w, scale) for w, scale in pairs]
    form = max((one.weight_format for one in each), key=_BY_GENERALITY.index)
    (w13, w13_scale, _), (w2, w2_scale, _) = (
        one if one.weight_format == form else repack(*pair, form) for one, pair in zip(each, pairs, strict=True)
    )
    copy = None
    if fp8:
        copy = prepare_weights(
            weights.w13,
            weights.w2,
            recipe="fp8_block",
            scale_format="fp32",
            w13_scale=_bytes(scales[0]),
            w2_scale=_bytes(scales[1]),
            source="mxfp4",
            arch="sm90",
        )
    tensors = dict(w13=w13, w13_scale=w13_scale, w2=w2, w2_scale=w2_scale)
    return replace(weights, **tensors, weight_format=form, fp8=copy)


def _bytes(scale: Tensor) -> Tensor:
    """(E, N, K / 128) words -> (E, N, K / 32) exponent bytes."""
    plain = scale.clone(memory_format=torch.contiguous_format)  # an axis of size 1 keeps its stride in contiguous()
    return plain.view(torch.uint8).view(*scale.shape[:2], -1)
