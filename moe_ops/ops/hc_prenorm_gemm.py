"""moe::hc_prenorm_gemm: the product and the sums of squares before a hyper-connection's norm, in one pass over x."""

import torch
from torch import Tensor

from moe_ops.backends import lazy
from moe_ops.meta import hc_prenorm_gemm as contract
from moe_ops.reference import hc_prenorm_gemm as reference
from moe_ops.registry import define_op, define_packed_ws

_SCHEMA = 'Tensor x, Tensor fn, *, int? num_splits=None, str backend="auto"'

HC_PRENORM_GEMM = define_op(
    "hc_prenorm_gemm",
    f"({_SCHEMA}) -> (Tensor out, Tensor sqr_sum)",
    contract=contract.hc_prenorm_gemm,
    kernels={
        "reference": reference.hc_prenorm_gemm,
        "triton": lazy("moe_ops.kernels.hc_prenorm_gemm:hc_prenorm_gemm"),
        "deep_gemm": lazy("moe_ops.kernels.deep_gemm_dense:hc_prenorm_gemm"),
    },
)
define_packed_ws(HC_PRENORM_GEMM, f"(Tensor(a!) ws, {_SCHEMA}) -> ()")


def hc_prenorm_gemm(
    x: Tensor, fn: Tensor, *, num_splits: int | None = None, backend: str = "auto"
) -> tuple[Tensor, Tensor]:
    """out = x @ fn.T and sqr_sum = (x * x).sum(1), accumulated in float32.

    RMSNorm's factor is one number a row, rsqrt(sqr_sum / K + eps), so it can follow the product. DeepSeek-V4 computes
    the mixing coefficients of its hyper-connections this way: K is the width of all residual streams, N small.

    Precision of fn: 24 bits of mantissa in the reference, 16 in the Triton kernel, 11 (tf32) in deep_gemm's
    tf32_hc_prenorm_gemm, after which the op is named. A row of x that holds an infinity has no finite product.

    Args:
        x: (M, K) bf16, contiguous. K a multiple of 64.
        fn: (N, K) fp32, contiguous.
        num_splits: None: whole sums. Else partial sums over this many ranges of whole blocks of 64 columns, the first
            ranges one block longer than the last; the caller adds them up.

    Returns:
        out: (M, N) fp32, or (num_splits, M, N).
        sqr_sum: (M,) fp32, or (num_splits, M).

    Raises:
        ValueError: shapes or strides that do not fit. TypeError: a dtype.
        NotImplementedError: backend="deep_gemm" where the library does not read this size.
    """
    return torch.ops.moe.hc_prenorm_gemm(x, fn, num_splits=num_splits, backend=backend)
