"""Contracts of moe::pre_permute_{contiguous,masked,gathered}."""

import torch

from moe_ops import check
from moe_ops.meta.grouped_gemm import BLOCKS_M
from moe_ops.meta.quantize import row_specs
from moe_ops.recipes import FLOATS, Recipe, get_recipe
from moe_ops.rows import contiguous_rows, gathered_tiles, masked_rows, route_chunks
from moe_ops.spec import TensorSpec

IDS = (torch.int32, torch.int64)


def contiguous_specs(T, K: int, top_k: int, E: int, recipe: Recipe, scale_format: str) -> tuple[TensorSpec, ...]:
    """(x_q, x_scale, m_indices, src2dst, ends, scratch)"""
    M = contiguous_rows(T, top_k, E)
    check_row_count(M)
    return (
        *row_specs(M, K, recipe=recipe, scale_format=scale_format),
        TensorSpec.contiguous(M, dtype=torch.int32),
        TensorSpec.contiguous(T, top_k, dtype=torch.int32),
        TensorSpec.contiguous(E, dtype=torch.int32),
        _scratch_spec(T, top_k, E),
    )


def masked_specs(T, K: int, top_k: int, E: int, recipe: Recipe, scale_format: str) -> tuple[TensorSpec, ...]:
    """(x_q, x_scale, masked_m, src2dst, scratch)"""
    check_row_count(E * masked_rows(T))
    return (
        *row_specs(E, masked_rows(T), K, recipe=recipe, scale_format=scale_format),
        TensorSpec.contiguous(E, dtype=torch.int32),
        TensorSpec.contiguous(T, top_k, dtype=torch.int32),
        _scratch_spec(T, top_k, E),
    )


def gathered_specs(
    T, K: int, top_k: int, E: int, recipe: Recipe, scale_format: str, block_m: int
) -> tuple[TensorSpec, ...]:
    """(x_q, x_scale, row_token, tiles, src2dst, scratch)"""
    routes = T * top_k
    check_row_count(routes)
    return (
        *row_specs(T, K, recipe=recipe, scale_format=scale_format),
        TensorSpec.contiguous(routes, dtype=torch.int32),
        TensorSpec.contiguous(3, gathered_tiles(routes, E, block_m), dtype=torch.int32),
        TensorSpec.contiguous(T, top_k, dtype=torch.int32),
        _scratch_spec(T, top_k, E),
    )


def _scratch_spec(T, top_k: int, E: int) -> TensorSpec:
    """What a kernel needs to sort many routes: two counters per expert and chunk of routes."""
    return TensorSpec.contiguous(2, route_chunks(T, top_k), E, dtype=torch.int32)


def check_row_count(rows) -> None:
    """src2dst holds row numbers in int32. A traced size is checked when the kernel runs."""
    if isinstance(rows, int):
        fix = "Split the tokens, or take the contiguous layout."
        check.value(rows < 2**31, "pre_permute", "the number of rows", "below 2^31", rows, fix)


def pre_permute_contiguous(**arguments) -> tuple[TensorSpec, ...]:
    return contiguous_specs(*_checked("pre_permute_contiguous", **arguments))


def pre_permute_masked(**arguments) -> tuple[TensorSpec, ...]:
    return masked_specs(*_checked("pre_permute_masked", **arguments))


def pre_permute_gathered(*, block_m, **arguments) -> tuple[TensorSpec, ...]:
    op = "pre_permute_gathered"
    check.one_of(op, "block_m", block_m, BLOCKS_M)
    return gathered_specs(*_checked(op, **arguments), block_m=block_m)


def _checked(op, *, hidden_states, topk_ids, num_local_experts, recipe, scale_format, expert_start, backend) -> tuple:
    row = get_recipe(op, recipe, scale_format)
    check_tokens(op, hidden_states, topk_ids)
    T, K = hidden_states.shape
    check.multiple(op, "K, the last axis of hidden_states,", K, row.granule, "Pad hidden_states and w13 with zeros.")
    check.value(num_local_experts >= 1, op, "num_local_experts", "at least 1", num_local_experts, "It is w13.shape[0].")
    check.value(expert_start >= 0, op, "expert_start", "at least 0", expert_start, "It is this rank's first expert id.")
    return T, K, topk_ids.shape[1], num_local_experts, row, scale_format


def check_tokens(op: str, hidden_states, topk_ids) -> None:
    check.value(
        hidden_states.dim() == 2,
        op,
        "hidden_states",
        "of shape (T, K)",
        lambda: tuple(hidden_states.shape),
        "Flatten batch and sequence into tokens.",
    )
    check.dtype(op, "hidden_states", hidden_states, FLOATS, "Cast them first.")
    check.value(
        topk_ids.dim() == 2, op, "topk_ids", "of shape (T, top_k)", lambda: tuple(topk_ids.shape), "Unsqueeze them."
    )
    check.shape(op, "topk_ids", topk_ids, (hidden_states.shape[0], None), "(T, top_k)", "One row per token.")
    check.value(topk_ids.shape[1] >= 1, op, "topk_ids", "of at least one column", 0, "A token needs a route.")
    check.dtype(op, "topk_ids", topk_ids, IDS, "Use topk_ids.int().")
    check.same_device(op, hidden_states.device, topk_ids=topk_ids)
