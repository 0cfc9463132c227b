"""Reference of moe::gated_gemm_{gathered,direct}: GEMM1 as grouped_gemm rounds it, then the activation.

The product is rounded to bf16 between the two, as in the layouts that write it to memory, so that every layout gives
the same bits here. The kernels keep it in float32.
"""

import torch

from moe_ops.recipes import get_recipe
from moe_ops.reference.grouped_gemm import as_rows, expert_spans, product, take
from moe_ops.reference.silu_and_quant import gated


def gated_gemm_gathered(
    outputs,
    *,
    x,
    x_scale,
    row_token,
    tiles,
    w,
    w_scale,
    block_m,
    recipe,
    scale_format,
    weight_format,
    bias,
    **formula,
) -> None:
    act_out, scale_out = outputs
    row = get_recipe("gated_gemm_gathered", recipe)
    for expert, first, end in expert_spans(tiles):
        token = row_token[first:end].long()
        scale = x_scale[token] if row.quantised else None
        gateup = product(take(x, token), scale, w, w_scale, expert, row, weight_format)
        values, scale = as_rows(_act(gateup, bias, expert, formula), row, scale_format)
        act_out[first:end] = values
        if scale is not None:
            scale_out[first:end] = scale


def gated_gemm_direct(
    outputs, *, hidden_states, topk_ids, w, w_scale, recipe, scale_format, expert_start, bias, **formula
) -> None:
    act_out, src2dst = outputs
    row = get_recipe("gated_gemm_direct", recipe)
    local = topk_ids.long() - expert_start
    here = (topk_ids >= 0) & (local >= 0) & (local < len(w))
    routes = torch.arange(topk_ids.numel(), dtype=torch.int32, device=topk_ids.device).view_as(topk_ids)
    src2dst.copy_(torch.where(here, routes, -1))
    local = torch.where(here, local, -1).flatten()
    for expert in local[local >= 0].unique().tolist():
        rows = (local == expert).nonzero().flatten()
        values, scale = as_rows(hidden_states[rows // topk_ids.shape[1]], row, scale_format)
        act_out[rows] = _act(product(values, scale, w, w_scale, expert, row), bias, expert, formula)


def _act(gateup: torch.Tensor, bias: torch.Tensor | None, expert: int, formula: dict) -> torch.Tensor:
    """float32 (rows, I)."""
    h = gateup.float()
    if bias is not None:
        h = h + bias[expert].float()
    return gated(*h.chunk(2, -1), **formula)
