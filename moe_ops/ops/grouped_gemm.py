"""moe::grouped_gemm_{contiguous,masked,gathered,direct} and moe::grouped_gemm_ws: expert rows times expert weights."""

import torch
from torch import Tensor

from moe_ops.backends import lazy
from moe_ops.meta import grouped_gemm as contract
from moe_ops.reference import grouped_gemm as reference
from moe_ops.registry import define_op, define_ws
from moe_ops.rows import ceil_div
from moe_ops.workspace import LAYER_SCHEMA, Stage

_OPERANDS = "Tensor x, Tensor? x_scale, Tensor w, Tensor? w_scale"

CONTIGUOUS = define_op(
    "grouped_gemm_contiguous",
    f'({_OPERANDS}, Tensor m_indices, *, str recipe, Tensor? ends=None, str backend="auto") -> Tensor',
    contract=contract.grouped_gemm_contiguous,
    kernels={
        "reference": reference.grouped_gemm_contiguous,
        "triton": lazy("moe_ops.kernels.grouped_gemm:grouped_gemm_contiguous"),
        "deep_gemm": lazy("moe_ops.kernels.deep_gemm:grouped_gemm_contiguous"),
    },
)
MASKED = define_op(
    "grouped_gemm_masked",
    f'({_OPERANDS}, Tensor masked_m, *, str recipe, SymInt expected_m=1, str backend="auto") -> Tensor',
    contract=contract.grouped_gemm_masked,
    kernels={
        "reference": reference.grouped_gemm_masked,
        "triton": lazy("moe_ops.kernels.grouped_gemm:grouped_gemm_masked"),
        "deep_gemm": lazy("moe_ops.kernels.deep_gemm:grouped_gemm_masked"),
    },
)

GATHERED = define_op(
    "grouped_gemm_gathered",
    f'({_OPERANDS}, Tensor tiles, *, int block_m, str recipe, str weight_format="natural", str backend="auto") '
    "-> Tensor",
    contract=contract.grouped_gemm_gathered,
    kernels={
        "reference": reference.grouped_gemm_gathered,
        "triton": lazy("moe_ops.kernels.grouped_gemm_gathered:grouped_gemm_gathered"),
    },
)
DIRECT = define_op(
    "grouped_gemm_direct",
    "(Tensor x, Tensor topk_ids, Tensor w, Tensor? w_scale, *, str recipe, str scale_format, int expert_start=0, "
    'str backend="auto") -> Tensor',
    contract=contract.grouped_gemm_direct,
    kernels={
        "reference": reference.grouped_gemm_direct,
        "triton": lazy("moe_ops.kernels.grouped_gemm_gathered:grouped_gemm_direct"),
    },
)


def _ws(*, ws, topk_ids, w, w_scale, w_fp8, w_fp8_scale, expert_start, backend, **sizes) -> None:
    weights = (w, w_scale, w_fp8, w_fp8_scale)
    stage = Stage("grouped_gemm_ws", ws, topk_ids, *weights, backend=backend, **sizes)
    weight = stage.weight(*weights)
    if stage.layer.layout == "direct":
        own = dict(topk_ids=topk_ids, scale_format=stage.layer.scale_format, expert_start=expert_start)
        DIRECT.into((stage["down"],), x=stage["act"], **own, **weight)
    elif stage.layer.layout == "gathered":
        rows = dict(x=stage["act_q"], x_scale=stage["act_scale"], tiles=stage["tiles"], block_m=stage.block_m)
        GATHERED.into((stage["down"],), **rows, weight_format=stage.layer.weight_format, **weight)
    else:
        staged_gemm(stage, ("act_q", "act_scale", "down"), **weight)


def staged_gemm(stage: Stage, buffers: tuple[str, str, str], **weight) -> None:
    """One GEMM of the contiguous or masked layout, on the buffers (rows, their scales, result)."""
    x, x_scale, out = buffers
    rows = dict(x=stage[x], x_scale=stage[x_scale], **stage.row_map())
    if stage.layer.layout == "contiguous":
        CONTIGUOUS.into((stage[out],), **rows, ends=stage["ends"], **weight)
    else:
        layer = stage.layer
        MASKED.into((stage[out],), **rows, expected_m=ceil_div(layer.whole * layer.top_k, layer.experts), **weight)


define_ws(
    "grouped_gemm_ws",
    "(Tensor(a!) ws, Tensor topk_ids, Tensor w, Tensor? w_scale, Tensor? w_fp8, Tensor? w_fp8_scale, "
    f"int expert_start, {LAYER_SCHEMA}) -> ()",
    _ws,
)


def grouped_gemm_contiguous(
    x: Tensor,
    x_scale: Tensor | None,
    w: Tensor,
    w_scale: Tensor | None,
    m_indices: Tensor,
    *,
    recipe: str,
    ends: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """out[m] = dequantise(x[m]) @ dequantise(w[m_indices[m]]).T, accumulated in float32, rounded once to bf16.

    Args:
        x, x_scale: (M, K) rows and their MN-major scales, as pre_permute_contiguous returns them. M a multiple of 128.
        w, w_scale: (E, N, K) prepared weights (int8 (E, N, K / 2) for mxfp4) and their scales (prepare_weights).
        m_indices: (M,) int32. A block of 128 rows holds one expert's label and -1, and starts with the label if it has
            one: GPU kernels read that first row and compute the whole block, or skip it. The CPU refuses other blocks.
        recipe: name in RECIPES.
        ends: (E,) int32, where the caller has it: the row behind each expert's last, which says the same as m_indices
            does. A backend may walk it instead, and then leaves alone what lies between an end and the next block.

    Returns:
        (M, N) bf16. Rows labelled -1 are unspecified: 0 from the reference; a GPU kernel may fill the rest of a block.

    Raises:
        ValueError: shapes, strides or scale formats that do not fit, mixed blocks. TypeError: a dtype.
    """
    return torch.ops.moe.grouped_gemm_contiguous(
        x, x_scale, w, w_scale, m_indices, recipe=recipe, ends=ends, backend=backend
    )


def grouped_gemm_masked(
    x: Tensor,
    x_scale: Tensor | None,
    w: Tensor,
    w_scale: Tensor | None,
    masked_m: Tensor,
    *,
    recipe: str,
    expected_m: int = 1,
    backend: str = "auto",
) -> Tensor:
    """out[e, m] = dequantise(x[e, m]) @ dequantise(w[e]).T for m < masked_m[e]. As grouped_gemm_contiguous otherwise.

    Args:
        x, x_scale: (E, m_max, K) slabs and their MN-major scales, as pre_permute_masked returns them.
        masked_m: (E,) int32, valid rows of each slab.
        expected_m: mean rows an expert; tunes GPU kernels and never changes a value.

    Returns:
        (E, m_max, N) bf16. Rows past masked_m[e] are unspecified (0 from the reference).
    """
    return torch.ops.moe.grouped_gemm_masked(
        x, x_scale, w, w_scale, masked_m, expected_m=expected_m, recipe=recipe, backend=backend
    )


def grouped_gemm_gathered(
    x: Tensor,
    x_scale: Tensor | None,
    w: Tensor,
    w_scale: Tensor | None,
    tiles: Tensor,
    *,
    block_m: int,
    recipe: str,
    weight_format: str = "natural",
    backend: str = "auto",
) -> Tensor:
    """out[m] = dequantise(x[m]) @ dequantise(w[e]).T for the rows m of each tile of expert e.

    Args:
        x, x_scale: (R, K) rows in the order of experts and their MN-major scales, as gated_gemm_gathered returns them.
        w, w_scale: (E, N, K) prepared weights and their scales. N and K multiples of 128; bf16 or fp8_block, or mxfp4
            in a repacked weight_format.
        tiles, block_m: as pre_permute_gathered returned and was given them.
        weight_format: how w is stored; see weight_format.FORMATS.

    Returns:
        (R, N) bf16. Rows of no tile are unspecified.

    Raises:
        ValueError: shapes, strides or scale formats that do not fit. TypeError: a dtype.
    """
    return torch.ops.moe.grouped_gemm_gathered(
        x, x_scale, w, w_scale, tiles, block_m=block_m, recipe=recipe, weight_format=weight_format, backend=backend
    )


def grouped_gemm_direct(
    x: Tensor,
    topk_ids: Tensor,
    w: Tensor,
    w_scale: Tensor | None,
    *,
    recipe: str,
    scale_format: str,
    expert_start: int = 0,
    backend: str = "auto",
) -> Tensor:
    """out[r] = dequantise(quantise(x[r])) @ dequantise(w[e]).T for the expert e of each route r: for a few routes.

    Args:
        x: (T * top_k, K) float32, a row per route, as gated_gemm_direct returns it. Quantised here as the recipe says.
        topk_ids: (T, top_k) int32 or int64, global expert ids.
        w, w_scale, recipe: as in grouped_gemm_gathered. scale_format: that of w_scale, and of the quantised rows.
        expert_start: this rank's first expert id.

    Returns:
        (T * top_k, N) bf16. Rows of routes to other ranks are unspecified.

    Raises:
        ValueError: shapes or scale formats that do not fit. TypeError: a dtype.
    """
    return torch.ops.moe.grouped_gemm_direct(
        x,
        topk_ids,
        w,
        w_scale,
        recipe=recipe,
        scale_format=scale_format,
        expert_start=expert_start,
        backend=backend,
    )
