"""Reference of moe::silu_and_quant_contiguous and moe::silu_and_quant_masked. float32 until the one rounding."""

import torch

from moe_ops.recipes import get_recipe
from moe_ops.reference.bounds import check_below, check_counts
from moe_ops.reference.quantize import quantize_groups, stored


def silu_and_quant_contiguous(outputs, *, gateup, m_indices, **attributes) -> None:
    act_out, scale_out = outputs
    if attributes["bias"] is not None:
        check_below("silu_and_quant_contiguous", "m_indices", m_indices, len(attributes["bias"]), "experts of bias")
    rows = (m_indices >= 0).nonzero().flatten()
    act, scale = _act(gateup[rows], m_indices[rows].long(), **attributes)
    _put(act_out, rows, act)
    if scale is not None:
        scale_out[rows] = scale


def silu_and_quant_masked(outputs, *, gateup, masked_m, **attributes) -> None:
    act_out, scale_out = outputs
    m_max = gateup.shape[1]
    check_counts("silu_and_quant_masked", masked_m, m_max)
    slot = torch.arange(m_max, device=gateup.device)
    expert, slot = (slot < masked_m[:, None]).nonzero(as_tuple=True)
    act, scale = _act(gateup[expert, slot], expert, **attributes)
    _put(act_out.flatten(0, 1), expert * m_max + slot, act)
    if scale is not None:
        scale_out[expert, slot] = scale


def _act(gateup, expert, *, bias, recipe, scale_format, **formula):
    """(values, scales as stored or None) of rows whose experts are given."""
    row = get_recipe("silu_and_quant", recipe)
    h = gateup.float()
    if bias is not None:
        h = h + bias.float()[expert]
    act = gated(*h.chunk(2, -1), **formula)
    if not row.quantised:
        return act.to(row.x_dtype), None
    values, scale = quantize_groups(act, row.x_group, scale_format)
    return values, stored(scale, scale_format)


def gated(gate, up, *, activation, swiglu_limit, gemm1_alpha, gemm1_clamp_limit) -> torch.Tensor:
    """The gated activation. Limits bound the gate from above only, and the up half on both sides."""
    if activation == "situ":
        bounded = gemm1_alpha * torch.tanh(gate / gemm1_alpha) * _sigmoid(gate)
        return bounded * (gemm1_clamp_limit * torch.tanh(up / gemm1_clamp_limit))
    limit = swiglu_limit if gemm1_alpha is None else gemm1_clamp_limit
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    if gemm1_alpha is not None:
        return gate * _sigmoid(gemm1_alpha * gate) * (up + 1.0)
    return gate * _sigmoid(gate) * up


def _sigmoid(x: torch.Tensor) -> torch.Tensor:
    """Equal inputs, equal bits: torch.sigmoid rounds differently in a vector's tail, so it depends on the batch."""
    return 1.0 / (1.0 + torch.exp(-x))


def _put(out: torch.Tensor, rows: torch.Tensor, values: torch.Tensor) -> None:
    """out[rows] = values for any dtype: torch cannot index fp8 on a CPU."""
    if out.dtype.itemsize == 1:
        out, values = out.view(torch.uint8), values.view(torch.uint8)
    out[rows] = values
