"""moe::gemm_nt_bf16_fp32: a dense product of bf16 operands that keeps its float32 sums."""

import torch
from torch import Tensor

from moe_ops.backends import lazy
from moe_ops.meta import gemm_nt_bf16_fp32 as contract
from moe_ops.reference import gemm_nt_bf16_fp32 as reference
from moe_ops.registry import define_op, define_packed_ws

_SCHEMA = 'Tensor x, Tensor w, *, str backend="auto"'

GEMM_NT_BF16_FP32 = define_op(
    "gemm_nt_bf16_fp32",
    f"({_SCHEMA}) -> Tensor",
    contract=contract.gemm_nt_bf16_fp32,
    kernels={
        "reference": reference.gemm_nt_bf16_fp32,
        "triton": lazy("moe_ops.kernels.gemm_nt_bf16_fp32:gemm_nt_bf16_fp32"),
        "deep_gemm": lazy("moe_ops.kernels.deep_gemm_dense:gemm_nt_bf16_fp32"),
    },
)
define_packed_ws(GEMM_NT_BF16_FP32, f"(Tensor(a!) ws, {_SCHEMA}) -> ()")


def gemm_nt_bf16_fp32(x: Tensor, w: Tensor, *, backend: str = "auto") -> Tensor:
    """out = x @ w.T, accumulated in float32 and not rounded: logits of a router from its bf16 weight.

    Args:
        x: (M, K) bf16, contiguous. Any sizes; GPU kernels are fast where K is a multiple of 16.
        w: (N, K) bf16, contiguous.

    Returns:
        (M, N) fp32.

    Raises:
        ValueError: shapes or strides that do not fit. TypeError: a dtype.
        NotImplementedError: backend="deep_gemm" where the library does not read this size.
    """
    return torch.ops.moe.gemm_nt_bf16_fp32(x, w, backend=backend)
