"""moe::gated_gemm_{gathered,direct} and moe::gated_gemm_ws: GEMM1, with the activation where one kernel does both."""

import torch
from torch import Tensor

from moe_ops.backends import lazy
from moe_ops.meta import gated_gemm as contract
from moe_ops.ops.grouped_gemm import staged_gemm
from moe_ops.ops.silu_and_quant import FORMULA_SCHEMA
from moe_ops.reference import gated_gemm as reference
from moe_ops.registry import define_op, define_ws
from moe_ops.workspace import LAYER_SCHEMA, Stage

GATHERED = define_op(
    "gated_gemm_gathered",
    "(Tensor x, Tensor? x_scale, Tensor row_token, Tensor tiles, Tensor w, Tensor? w_scale, *, int block_m, "
    f'str recipe, str scale_format="fp32", str weight_format="natural", {FORMULA_SCHEMA}, Tensor? bias=None, '
    'str backend="auto") -> (Tensor act_q, Tensor act_scale)',
    contract=contract.gated_gemm_gathered,
    kernels={
        "reference": reference.gated_gemm_gathered,
        "triton": lazy("moe_ops.kernels.gated_gemm:gated_gemm_gathered"),
    },
)
DIRECT = define_op(
    "gated_gemm_direct",
    "(Tensor hidden_states, Tensor topk_ids, Tensor w, Tensor? w_scale, *, str recipe, "
    f'str scale_format="fp32", int expert_start=0, {FORMULA_SCHEMA}, Tensor? bias=None, str backend="auto") '
    "-> (Tensor act, Tensor src2dst)",
    contract=contract.gated_gemm_direct,
    kernels={
        "reference": reference.gated_gemm_direct,
        "triton": lazy("moe_ops.kernels.gated_gemm:gated_gemm_direct"),
    },
)


def _ws(
    *,
    ws,
    hidden_states,
    topk_ids,
    w,
    w_scale,
    w_fp8,
    w_fp8_scale,
    bias,
    activation,
    swiglu_limit,
    gemm1_alpha,
    gemm1_clamp_limit,
    expert_start,
    backend,
    **sizes,
) -> None:
    weights = (w, w_scale, w_fp8, w_fp8_scale)
    stage = Stage("gated_gemm_ws", ws, hidden_states, topk_ids, *weights, bias, backend=backend, **sizes)
    weight = stage.weight(*weights)
    if not stage.fused:  # the activation is a stage of its own
        staged_gemm(stage, ("x_q", "x_scale", "gateup"), **weight)
        return
    formula = dict(
        activation=activation,
        swiglu_limit=swiglu_limit,
        gemm1_alpha=gemm1_alpha,
        gemm1_clamp_limit=gemm1_clamp_limit,
        bias=bias,
        scale_format=stage.layer.scale_format,
    )
    if stage.layer.layout == "direct":
        source = dict(hidden_states=hidden_states, topk_ids=topk_ids, expert_start=expert_start)
        DIRECT.into((stage["act"], stage["src2dst"]), **source, **formula, **weight)
    else:
        rows = {name: stage[name] for name in ("x_scale", "row_token", "tiles")}
        outputs = (stage["act_q"], stage["act_scale"])
        form = dict(block_m=stage.block_m, weight_format=stage.layer.weight_format)
        GATHERED.into(outputs, x=stage["x_q"], **rows, **form, **formula, **weight)


define_ws(
    "gated_gemm_ws",
    "(Tensor(a!) ws, Tensor hidden_states, Tensor topk_ids, Tensor w, Tensor? w_scale, Tensor? w_fp8, "
    "Tensor? w_fp8_scale, Tensor? bias, str activation, "
    f"float? swiglu_limit, float? gemm1_alpha, float? gemm1_clamp_limit, int expert_start, {LAYER_SCHEMA}) -> ()",
    _ws,
)


def gated_gemm_gathered(
    x: Tensor,
    x_scale: Tensor | None,
    row_token: Tensor,
    tiles: Tensor,
    w: Tensor,
    w_scale: Tensor | None,
    *,
    block_m: int,
    recipe: str,
    scale_format: str = "fp32",
    weight_format: str = "natural",
    activation: str = "silu",
    swiglu_limit: float | None = None,
    gemm1_alpha: float | None = None,
    gemm1_clamp_limit: float | None = None,
    bias: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """act[m] = quantise(gated(x[row_token[m]] @ w[e].T + bias[e])) for the rows m of each tile of expert e.

    The formulas are those of silu_and_quant_contiguous. Kernels keep the product in float32 up to the quantisation;
    the reference rounds it to bf16, as the layouts do that write it to memory.

    Args:
        x, x_scale, row_token, tiles, block_m: as pre_permute_gathered returned and was given them.
        w, w_scale: (E, 2 I, K) prepared weights, gate rows over up rows, and their scales. K and I multiples of 128.
        recipe, scale_format: of the prepared weights: bf16 or fp8_block, or mxfp4 in a repacked weight_format.
        weight_format: how w is stored; see weight_format.FORMATS.
        activation, swiglu_limit, gemm1_alpha, gemm1_clamp_limit, bias: as in silu_and_quant_contiguous.

    Returns:
        act_q: (R, I) in the recipe's dtype. act_scale: as quantize returns it, MN-major; empty for bf16. Rows of no
        tile are unspecified.

    Raises:
        ValueError: shapes, strides or scale formats that do not fit; attributes that name no formula. TypeError: a
            dtype.
    """
    return torch.ops.moe.gated_gemm_gathered(
        x,
        x_scale,
        row_token,
        tiles,
        w,
        w_scale,
        block_m=block_m,
        recipe=recipe,
        scale_format=scale_format,
        weight_format=weight_format,
        activation=activation,
        swiglu_limit=swiglu_limit,
        gemm1_alpha=gemm1_alpha,
        gemm1_clamp_limit=gemm1_clamp_limit,
        bias=bias,
        backend=backend,
    )


def gated_gemm_direct(
    hidden_states: Tensor,
    topk_ids: Tensor,
    w: Tensor,
    w_scale: Tensor | None,
    *,
    recipe: str,
    scale_format: str = "fp32",
    expert_start: int = 0,
    activation: str = "silu",
    swiglu_limit: float | None = None,
    gemm1_alpha: float | None = None,
    gemm1_clamp_limit: float | None = None,
    bias: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """act[r] = gated(quantise(hidden_states[t]) @ w[e].T + bias[e]) for each route r of a token t to an expert e.

    For a few routes: no routing before it, a route a program.

    Args:
        hidden_states: (T, K) bf16, fp16 or fp32. Quantised here as the recipe says.
        topk_ids: (T, top_k) int32 or int64, global expert ids.
        w, w_scale, recipe, scale_format, activation ... bias: as in gated_gemm_gathered.
        expert_start: this rank's first expert id.

    Returns:
        act: (T * top_k, I) float32, not quantised yet; rows of routes to other ranks are unspecified.
        src2dst: (T, top_k) int32, the number of each route, -1 where it goes to another rank.

    Raises:
        ValueError: shapes or scale formats that do not fit; attributes that name no formula. TypeError: a dtype.
    """
    return torch.ops.moe.gated_gemm_direct(
        hidden_states,
        topk_ids,
        w,
        w_scale,
        recipe=recipe,
        scale_format=scale_format,
        expert_start=expert_start,
        activation=activation,
        swiglu_limit=swiglu_limit,
        gemm1_alpha=gemm1_alpha,
        gemm1_clamp_limit=gemm1_clamp_limit,
        bias=bias,
        backend=backend,
    )
