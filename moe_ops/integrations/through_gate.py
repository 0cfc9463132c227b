"""The expert layer for gates that no formula is, experts without a gate, and experts with a norm behind them.

The stages of fused_deepgemm as functional ops, with the model's own functions between them, in the dtype of its hidden
states. Rows that no route owns pass through them too; nothing reads what comes out.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_ops.integrations.gates import interleave
from moe_ops.integrations.modules import ExpertsModule
from moe_ops.recipes import get_recipe


def through_gate(
    module: ExpertsModule, call, tensors: dict, x: Tensor, topk_ids: Tensor, topk_weights: Tensor
) -> Tensor:
    """(T, K) -> (T, K), K with padding.

    Args:
        module: the experts module; its _apply_gate or act_fn, and post_expert_norm if it has one.
        call: an experts.Call. tensors: by the names of fused_deepgemm; w13 (E, I, K) if the module has no gate.
    """
    moe, dtype = torch.ops.moe, x.dtype
    scales = dict(recipe=call.recipe, scale_format=call.scale_format)
    x_q, x_scale, m_indices, src2dst = moe.pre_permute_contiguous(
        x, topk_ids, num_local_experts=tensors["w2"].shape[0], **scales
    )
    expert = m_indices.clamp(min=0)
    weight = dict(m_indices=m_indices, recipe=call.recipe)
    gateup = moe.grouped_gemm_contiguous(x_q, x_scale, tensors["w13"], tensors["w13_scale"], **weight)
    gateup = _biased(gateup.to(dtype), tensors["w13_bias"], expert)
    act = _activated(module, gateup, call.padding.I)
    act_q, act_scale = _quantised(act, **scales)
    down = moe.grouped_gemm_contiguous(act_q, act_scale, tensors["w2"], tensors["w2_scale"], **weight)
    bias = dict(topk_ids=topk_ids, bias=tensors["w2_bias"])
    if getattr(module, "has_post_expert_norm", False):
        K = down.shape[1] - call.padding.K
        normed = module.post_expert_norm(_biased(down.to(dtype), tensors["w2_bias"], expert)[:, :K])
        down, bias = F.pad(normed, (0, call.padding.K)), {}
    return moe.post_permute(down, src2dst, topk_weights, **bias, dtype=dtype)


def _activated(module: ExpertsModule, gateup: Tensor, padding: int) -> Tensor:
    """(M, N) -> (M, I), I with padding, which the model's own function does not see."""
    if not module.has_gate:
        return module.act_fn(gateup)
    gate, up = (half[:, : half.shape[1] - padding] for half in gateup.chunk(2, -1))
    act = module._apply_gate(torch.cat((gate, up), -1) if module.is_concatenated else interleave(gate, up))
    return F.pad(act, (0, padding)) if padding else act


def _biased(rows: Tensor, bias: Tensor | None, expert: Tensor) -> Tensor:
    return rows if bias is None else rows + bias.to(rows.dtype)[expert]


def _quantised(act: Tensor, recipe: str, scale_format: str) -> tuple[Tensor, Tensor | None]:
    row = get_recipe("through_gate", recipe)
    if not row.quantised:
        return act.to(row.x_dtype), None
    return torch.ops.moe.quantize(act, group=row.x_group, scale_format=scale_format)
