"""moe::post_permute and moe::post_permute_ws: expert rows back to tokens."""

import torch
from torch import Tensor

from moe_ops.backends import lazy
from moe_ops.meta import post_permute as contract
from moe_ops.recipes import FLOATS
from moe_ops.reference import post_permute as reference
from moe_ops.registry import define_op, define_ws
from moe_ops.spec import TensorSpec
from moe_ops.workspace import LAYER_SCHEMA, Stage

POST_PERMUTE = define_op(
    "post_permute",
    "(Tensor rows, Tensor src2dst, Tensor? topk_weights=None, *, Tensor? topk_ids=None, Tensor? bias=None, "
    'int expert_start=0, float routed_scaling_factor=1.0, str mode="sum", ScalarType? dtype=None, '
    'str backend="auto") -> Tensor',
    contract=contract.post_permute,
    kernels={"reference": reference.post_permute, "triton": lazy("moe_ops.kernels.post_permute:post_permute")},
)


_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in FLOATS}


def _ws(*, ws, topk_weights, topk_ids, bias, expert_start, routed_scaling_factor, dtype, backend, **sizes) -> Tensor:
    stage = Stage("post_permute_ws", ws, topk_weights, topk_ids, bias, backend=backend, **sizes)
    arguments = dict(
        rows=stage["down"],
        src2dst=stage["src2dst"],
        topk_weights=topk_weights,
        topk_ids=topk_ids,
        bias=bias,
        expert_start=expert_start,
        routed_scaling_factor=routed_scaling_factor,
        mode="sum",
        dtype=_DTYPES[dtype],
        backend=backend,
    )
    (spec,) = POST_PERMUTE.contract(**arguments)
    out = spec.empty(ws.device)
    POST_PERMUTE.into((out,), **arguments)
    return out


def _result(*, T, K, dtype, **_) -> tuple[TensorSpec]:
    return (TensorSpec.contiguous(T, K, dtype=_DTYPES[dtype]),)


define_ws(
    "post_permute_ws",
    "(Tensor ws, Tensor topk_weights, Tensor topk_ids, Tensor? bias, int expert_start, float routed_scaling_factor, "
    f"str dtype, {LAYER_SCHEMA}) -> Tensor",
    _ws,
    contract=_result,
)


def post_permute(
    rows: Tensor,
    src2dst: Tensor,
    topk_weights: Tensor | None = None,
    *,
    topk_ids: Tensor | None = None,
    bias: Tensor | None = None,
    expert_start: int = 0,
    routed_scaling_factor: float = 1.0,
    mode: str = "sum",
    dtype: torch.dtype | None = None,
    backend: str = "auto",
) -> Tensor:
    """out[t] = routed_scaling_factor * sum_j topk_weights[t, j] * (rows[src2dst[t, j]] + bias[expert of t, j]).

    Float32, routes in order j = 0, 1, ..., one rounding at the end. A route with src2dst -1 adds nothing, and what
    its weight holds does not matter. A token without any local route gives zeros.

    Args:
        rows: (M, K) or (E, m_max, K), what the second GEMM wrote.
        src2dst: (T, top_k) int32 from pre_permute.
        topk_weights: (T, top_k) float. None: every route counts once.
        topk_ids, expert_start: needed beside bias: the ids and the offset that pre_permute was given.
        bias: (E, K) float, of the second GEMM.
        mode: sum, or routewise: (T, top_k, K) before the sum, 0 where there is no route, for a later finaliser.
        dtype: of the result; None: that of rows.

    Returns:
        (T, K), or (T, top_k, K) for routewise.
    """
    return torch.ops.moe.post_permute(
        rows,
        src2dst,
        topk_weights,
        topk_ids=topk_ids,
        bias=bias,
        expert_start=expert_start,
        routed_scaling_factor=routed_scaling_factor,
        mode=mode,
        dtype=dtype,
        backend=backend,
    )
