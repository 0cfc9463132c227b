"""One rank's part of prepared experts: some of the experts, or a part of every expert's intermediate size.

For layers that are whole in memory. load_moe_weights(parallel="ep" or "tp") cuts a checkpoint the same way and never
holds the whole.
"""

from dataclasses import replace

import torch
from torch import Tensor

from moe_ops import check
from moe_ops.dispatch.wire import as_bytes
from moe_ops.meta.grouped_gemm import weight_scale_spec
from moe_ops.prep import MoEWeights
from moe_ops.recipes import get_recipe
from moe_ops.rows import ceil_div

_TENSORS = ("w13", "w13_scale", "w2", "w2_scale", "w13_bias", "w2_bias")


def split_experts(weights: MoEWeights, rank: int, ranks: int) -> MoEWeights:
    """Experts [rank * E / ranks, (rank + 1) * E / ranks), as views.

    Raises:
        ValueError: the experts do not divide by the ranks, or rank is none of them.
    """
    op = "split_experts"
    _check_rank(op, rank, ranks)
    check.multiple(op, "E", weights.E, ranks, "Choose a number of ranks that divides it, or split_intermediate.")
    each = weights.E // ranks
    own = slice(rank * each, (rank + 1) * each)
    tensors = {name: getattr(weights, name) for name in _TENSORS}
    fp8 = None if weights.fp8 is None else split_experts(weights.fp8, rank, ranks)
    return replace(weights, fp8=fp8, **{name: None if t is None else t[own] for name, t in tensors.items()})


def split_intermediate(weights: MoEWeights, rank: int, ranks: int) -> MoEWeights:
    """Columns [rank * I / ranks, (rank + 1) * I / ranks) of every expert, as copies; their results add up to the whole.

    The bias of the second GEMM stays with rank 0, so that the sum holds it once.

    Raises:
        ValueError: I / ranks is not a multiple of the columns that share a scale; repacked weights; rank is no rank.
    """
    op = "split_intermediate"
    _check_rank(op, rank, ranks)
    natural, fix = weights.weight_format == "natural", "Split first, and repack the parts."
    check.value(natural, op, "weight_format", "natural", weights.weight_format, fix)
    row = get_recipe(op, weights.recipe)
    fix = "Choose fewer ranks, or load with parallel='tp', which pads."
    check.multiple(op, "I", weights.I, ranks * row.granule, fix)
    E, K, I = weights.E, weights.K, weights.I // ranks
    own = slice(rank * I, (rank + 1) * I)

    def halves(tensor: Tensor, part: slice) -> Tensor:
        return tensor.unflatten(1, (2, -1))[:, :, part].flatten(1, 2).contiguous()

    w13_scale, w2_scale = weights.w13_scale, weights.w2_scale
    if weights.scale_format == "fp32":
        assert w13_scale is not None and w2_scale is not None
        rows = slice(own.start // row.w_block[0], own.stop // row.w_block[0])
        w13_scale, w2_scale = halves(w13_scale, rows), w2_scale[:, :, rows].contiguous()
    elif weights.scale_format == "ue8m0":
        assert w13_scale is not None and w2_scale is not None
        spec = weight_scale_spec(E, 2 * I, K, row, "ue8m0")
        w13_scale = spec.zeros(w13_scale.device).copy_(halves(w13_scale, own))
        columns = row.w_block[1]
        exponents = as_bytes(w2_scale)[:, :, : ceil_div(weights.I, columns)]
        exponents = exponents[:, :, own.start // columns : own.stop // columns].contiguous()
        w2_scale = torch.ops.moe.pack_scale(exponents, K, scale_format="ue8m0")
    packed = slice(own.start // row.w_pack, own.stop // row.w_pack)
    return replace(
        weights,
        w13=halves(weights.w13, own),
        w13_scale=w13_scale,
        w2=weights.w2[:, :, packed].contiguous(),
        w2_scale=w2_scale,
        w13_bias=None if weights.w13_bias is None else halves(weights.w13_bias, own),
        w2_bias=weights.w2_bias if rank == 0 else None,
        padding=replace(weights.padding, I=0),
    )


def _check_rank(op: str, rank: int, ranks: int) -> None:
    check.value(ranks >= 1, op, "ranks", "at least 1", ranks, "It counts them.")
    check.value(0 <= rank < ranks, op, "rank", f"in [0, {ranks})", rank, "Ranks count from 0.")
