"""Contracts of moe::gated_gemm_gathered and moe::gated_gemm_direct."""

import torch

from moe_ops import check
from moe_ops.meta.grouped_gemm import check_format, check_fused, check_tiles, check_weight
from moe_ops.meta.pre_permute import check_row_count, check_tokens
from moe_ops.meta.quantize import check_rows, row_specs
from moe_ops.meta.silu_and_quant import check_activation, check_bias
from moe_ops.recipes import Recipe, get_recipe
from moe_ops.spec import TensorSpec


def gathered_specs(rows, I: int, recipe: Recipe, scale_format: str) -> tuple[TensorSpec, TensorSpec]:
    """(act_q, act_scale)"""
    return row_specs(rows, I, recipe=recipe, scale_format=scale_format)


def direct_specs(T, top_k: int, I: int) -> tuple[TensorSpec, TensorSpec]:
    """(act, src2dst)"""
    check_row_count(T * top_k)
    return (
        TensorSpec.contiguous(T * top_k, I, dtype=torch.float32),
        TensorSpec.contiguous(T, top_k, dtype=torch.int32),
    )


def gated_gemm_gathered(
    *, x, x_scale, row_token, tiles, w, w_scale, block_m, recipe, scale_format, weight_format, bias, backend, **formula
) -> tuple[TensorSpec, TensorSpec]:
    op = "gated_gemm_gathered"
    row, I, K = _checked(op, w, w_scale, recipe, scale_format, weight_format, bias, **formula)
    check_rows(op, "x", x, x_scale, (x.shape[0], K), "(T, K)", row, scale_format)
    check.value(row_token.dim() == 1, op, "row_token", "of shape (R,)", lambda: tuple(row_token.shape), "Flatten it.")
    check.dtype(op, "row_token", row_token, (torch.int32,), "Pass pre_permute_gathered's result.")
    check_tiles(op, tiles, block_m)
    check.same_device(op, x.device, x_scale=x_scale, row_token=row_token, tiles=tiles, w=w, w_scale=w_scale, bias=bias)
    return gathered_specs(row_token.shape[0], I, row, scale_format)


def gated_gemm_direct(
    *, hidden_states, topk_ids, w, w_scale, recipe, scale_format, expert_start, bias, backend, **formula
) -> tuple[TensorSpec, TensorSpec]:
    op = "gated_gemm_direct"
    _, I, K = _checked(op, w, w_scale, recipe, scale_format, "natural", bias, **formula)
    check_tokens(op, hidden_states, topk_ids)
    check.shape(op, "hidden_states", hidden_states, (None, K), "(T, K)", "K is that of w.")
    check.value(expert_start >= 0, op, "expert_start", "at least 0", expert_start, "It is this rank's first expert id.")
    check.same_device(op, hidden_states.device, topk_ids=topk_ids, w=w, w_scale=w_scale, bias=bias)
    return direct_specs(hidden_states.shape[0], topk_ids.shape[1], I)


def _checked(
    op: str, w, w_scale, recipe: str, scale_format: str, weight_format: str, bias, **formula
) -> tuple[Recipe, int, int]:
    """The recipe's row, I and K."""
    row = get_recipe(op, recipe, scale_format)
    check_activation(op, **formula)
    form = check_format(op, weight_format, row)
    fix = "Use moe_ops.prepare_weights."
    check.value(w.dim() == 3 + form.repacked, op, "w", "of shape (E, 2 I, K)", lambda: tuple(w.shape), fix)
    E, N, K = form.sizes(w, row.w_pack)
    check.multiple(op, "2 I, the rows of w,", N, 2, "Gate rows lie over up rows.")
    check_fused(op, row, N // 2, K, weight_format)
    got = check_weight(op, "w", w, w_scale, (E, N, K), "(E, 2 I, K)", row, weight_format)
    check.value(got == scale_format, op, "scale_format", f"that of w_scale, {got}", scale_format, "Pass it.")
    check_bias(op, "bias", bias, (E, N), "(E, 2 I)")
    return row, N // 2, K
