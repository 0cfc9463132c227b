"""Contract of moe::post_permute."""

import torch

from moe_ops import check
from moe_ops.meta.pre_permute import IDS
from moe_ops.meta.silu_and_quant import check_bias
from moe_ops.recipes import FLOATS
from moe_ops.spec import TensorSpec

MODES = ("sum", "routewise")


def post_permute(
    *,
    rows,
    src2dst,
    topk_weights,
    topk_ids,
    bias,
    expert_start,
    routed_scaling_factor,
    mode,
    dtype,
    backend,
) -> tuple[TensorSpec]:
    op = "post_permute"
    check.value(
        rows.dim() in (2, 3),
        op,
        "rows",
        "of shape (M, K) or (E, m_max, K)",
        lambda: tuple(rows.shape),
        "Pass GEMM2's result.",
    )
    check.dtype(op, "rows", rows, FLOATS, "It is what the grouped GEMM writes.")
    check.value(src2dst.dim() == 2, op, "src2dst", "of shape (T, top_k)", lambda: tuple(src2dst.shape), "Unflatten it.")
    check.dtype(op, "src2dst", src2dst, (torch.int32,), "Pass pre_permute's result.")
    T, top_k = src2dst.shape
    K = rows.shape[-1]
    if topk_weights is not None:
        check_weights(op, topk_weights, T, top_k)
    check_bias(op, "bias", bias, (None, K), "(E, K)")
    if bias is not None:
        topk_ids = check.given(op, "topk_ids", topk_ids, "beside bias")
        check.shape(op, "topk_ids", topk_ids, (T, top_k), "(T, top_k)", "The ids that pre_permute was given.")
        check.dtype(op, "topk_ids", topk_ids, IDS, "Use topk_ids.int().")
    check.one_of(op, "mode", mode, MODES)
    out_dtype = rows.dtype if dtype is None else dtype
    check.value(out_dtype in FLOATS, op, "dtype", "bfloat16, float16 or float32", out_dtype, "Choose one of them.")
    check.same_device(op, rows.device, src2dst=src2dst, topk_weights=topk_weights, topk_ids=topk_ids, bias=bias)
    shape = (T, K) if mode == "sum" else (T, top_k, K)
    return (TensorSpec.contiguous(*shape, dtype=out_dtype),)


def check_weights(op: str, topk_weights, T, top_k) -> None:
    check.shape(op, "topk_weights", topk_weights, (T, top_k), "(T, top_k)", "One weight per route.")
    check.dtype(op, "topk_weights", topk_weights, FLOATS, "Use topk_weights.float().")
