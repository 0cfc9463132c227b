"""Triton kernels of moe::post_permute."""

import triton
import triton.language as tl

from moe_ops.kernels.launch import gdc_launch_dependents, gdc_wait, given, jit, pdl


# BLOCK_K columns of one token: its routes in order, in float32. Grid (tokens, column blocks).
@jit
def _post_permute_kernel(
    rows_ptr, stride_rm, stride_rk,
    src2dst_ptr, stride_dt, stride_dj,
    weights_ptr, stride_wt, stride_wj,
    ids_ptr, stride_it, stride_ij,
    bias_ptr, stride_be, stride_bk,
    out_ptr, stride_ot, stride_oj,
    E, K, expert_start, factor,
    TOP_K: tl.constexpr, BLOCK_K: tl.constexpr, ROUTEWISE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    inside = column < K
    out_ptrs = out_ptr + token * stride_ot + column
    total = tl.zeros((BLOCK_K,), tl.float32)
    for route in tl.static_range(TOP_K):
        row = tl.load(src2dst_ptr + token * stride_dt + route * stride_dj).to(tl.int64)
        here = row >= 0
        value = tl.load(rows_ptr + row * stride_rm + column * stride_rk, mask=inside & here, other=0.0).to(tl.float32)
        if bias_ptr is not None:
            expert = tl.load(ids_ptr + token * stride_it + route * stride_ij).to(tl.int64) - expert_start
            local = here & (expert >= 0) & (expert < E)
            bias = tl.load(bias_ptr + expert * stride_be + column * stride_bk, mask=inside & local, other=0.0)
            value += bias.to(tl.float32)
        if weights_ptr is not None:
            value *= tl.load(weights_ptr + token * stride_wt + route * stride_wj, mask=here, other=0.0).to(tl.float32)
        if ROUTEWISE:
            result = tl.where(here, value * factor, 0.0)
            tl.store(out_ptrs + route * stride_oj, result.to(out_ptr.dtype.element_ty), mask=inside)
        else:
            total += value
    if not ROUTEWISE:
        tl.store(out_ptrs, (total * factor).to(out_ptr.dtype.element_ty), mask=inside)


def post_permute(
    outputs, *, rows, src2dst, topk_weights, topk_ids, bias, expert_start, routed_scaling_factor, mode, dtype
) -> None:
    """moe::post_permute."""
    (out,) = outputs
    rows = rows.flatten(0, -2)
    T, top_k = src2dst.shape
    K = rows.shape[1]
    # Few tokens: more programs a token. 1024 columns are 16 bytes a thread and route.
    block = 1024 if T >= 64 else 256
    _post_permute_kernel[(T, triton.cdiv(K, block))](
        rows, *rows.stride(),
        src2dst, *src2dst.stride(),
        *given(topk_weights),
        *given(topk_ids if bias is not None else None),
        *given(bias),
        out, out.stride(0), out.stride(1) if mode == "routewise" else 0,
        0 if bias is None else len(bias), K, expert_start, routed_scaling_factor,
        TOP_K=top_k, BLOCK_K=block, ROUTEWISE=mode == "routewise", **pdl(rows.device),
        enable_fp_fusion=False,  # products round before they are added: the reference's bits
    )  # fmt: skip
