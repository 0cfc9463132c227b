"""Contracts of moe::silu_and_quant_contiguous and moe::silu_and_quant_masked."""

import torch

from moe_ops import check
from moe_ops.meta.grouped_gemm import check_m_indices, check_masked_m
from moe_ops.meta.quantize import row_specs
from moe_ops.recipes import FLOATS, get_recipe
from moe_ops.spec import TensorSpec

ACTIVATIONS = ("silu", "situ")


def check_activation(op: str, activation, swiglu_limit, gemm1_alpha, gemm1_clamp_limit) -> None:
    """The four attributes name one formula; combinations that name none are refused.

    silu, silu + swiglu_limit, silu + gemm1_alpha (+ gemm1_clamp_limit), situ + gemm1_alpha + gemm1_clamp_limit.
    """
    check.one_of(op, "activation", activation, ACTIVATIONS)
    for name, got in (("swiglu_limit", swiglu_limit), ("gemm1_clamp_limit", gemm1_clamp_limit)):
        check.value(got is None or got > 0, op, name, "positive", got, "Pass None for no clamp.")
    if activation == "situ":
        whole = gemm1_alpha is not None and gemm1_clamp_limit is not None and swiglu_limit is None
        fix = (
            "situ bounds the gate by gemm1_alpha and the up half by gemm1_clamp_limit; pass both, and no swiglu_limit."
        )
        got = f"gemm1_alpha={gemm1_alpha}, gemm1_clamp_limit={gemm1_clamp_limit}, swiglu_limit={swiglu_limit}"
        check.value(whole, op, "activation", "situ with both bounds", got, fix)
        check.value(gemm1_alpha != 0, op, "gemm1_alpha", "other than 0 for situ", gemm1_alpha, "It is a divisor.")
        return
    check.value(
        gemm1_alpha is None or swiglu_limit is None,
        op,
        "swiglu_limit",
        "None beside gemm1_alpha",
        swiglu_limit,
        "The clamp of the gemm1_alpha form is gemm1_clamp_limit.",
    )
    check.value(
        gemm1_clamp_limit is None or gemm1_alpha is not None,
        op,
        "gemm1_clamp_limit",
        "None without gemm1_alpha",
        gemm1_clamp_limit,
        "The clamp of plain silu is swiglu_limit.",
    )


def silu_and_quant_contiguous(*, gateup, m_indices, **attributes) -> tuple[TensorSpec, TensorSpec]:
    op = "silu_and_quant_contiguous"
    check.value(
        gateup.dim() == 2, op, "gateup", "of shape (M, 2 I)", lambda: tuple(gateup.shape), "Pass GEMM1's result."
    )
    check_m_indices(op, m_indices, gateup.shape[0])
    return _specs(op, gateup, m_indices=m_indices, **attributes)


def silu_and_quant_masked(*, gateup, masked_m, **attributes) -> tuple[TensorSpec, TensorSpec]:
    op = "silu_and_quant_masked"
    check.value(
        gateup.dim() == 3, op, "gateup", "of shape (E, m_max, 2 I)", lambda: tuple(gateup.shape), "Pass GEMM1's result."
    )
    check_masked_m(op, masked_m, gateup.shape[0])
    return _specs(op, gateup, masked_m=masked_m, **attributes)


def _specs(
    op, gateup, *, recipe, scale_format, activation, swiglu_limit, gemm1_alpha, gemm1_clamp_limit, bias, backend, **rows
) -> tuple[TensorSpec, TensorSpec]:
    row = get_recipe(op, recipe, scale_format)
    check_activation(op, activation, swiglu_limit, gemm1_alpha, gemm1_clamp_limit)
    check.dtype(op, "gateup", gateup, (torch.bfloat16,), "It is what the grouped GEMM writes.")
    check.multiple(op, "2 I, the last axis of gateup,", gateup.shape[-1], 2, "Gate and up lie side by side.")
    I = gateup.shape[-1] // 2
    check.multiple(op, "I", I, row.granule, "Pad w13 and w2 with zeros: moe_ops.prepare_weights.")
    check_bias(op, "bias", bias, (gateup.shape[0] if gateup.dim() == 3 else None, 2 * I), "(E, 2 I)")
    check.same_device(op, gateup.device, bias=bias, **rows)
    return row_specs(*gateup.shape[:-1], I, recipe=row, scale_format=scale_format)


def check_bias(op: str, name: str, bias, shape: tuple, letters: str) -> None:
    if bias is not None:
        check.shape(op, name, bias, shape, letters, "One row per local expert.")
        check.dtype(op, name, bias, FLOATS, "Cast it first.")
