"""moe::gemm_nt_mxfp8: a dense product of fp8 operands with a power-of-two scale per 32 columns."""

import torch
from torch import Tensor

from moe_ops.backends import lazy
from moe_ops.meta import gemm_nt_mxfp8 as contract
from moe_ops.reference import gemm_nt_mxfp8 as reference
from moe_ops.registry import define_op, define_packed_ws

_SCHEMA = 'Tensor x, Tensor x_scale, Tensor w, Tensor w_scale, *, str backend="auto"'

GEMM_NT_MXFP8 = define_op(
    "gemm_nt_mxfp8",
    f"({_SCHEMA}) -> Tensor",
    contract=contract.gemm_nt_mxfp8,
    kernels={
        "reference": reference.gemm_nt_mxfp8,
        "triton": lazy("moe_ops.kernels.gemm_nt_mxfp8:gemm_nt_mxfp8"),
        "deep_gemm": lazy("moe_ops.kernels.deep_gemm_dense:gemm_nt_mxfp8"),
    },
)
define_packed_ws(GEMM_NT_MXFP8, f"(Tensor(a!) ws, {_SCHEMA}) -> ()")


def gemm_nt_mxfp8(x: Tensor, x_scale: Tensor, w: Tensor, w_scale: Tensor, *, backend: str = "auto") -> Tensor:
    """out = dequantise(x) @ dequantise(w).T of recipe mxfp8, accumulated in float32, rounded once to bf16.

    The formats are those of OCP MX v1.0.

        x_q, x_scale = quantize(x, group=32, scale_format="ue8m0")      # and w_q, w_scale of w likewise

    Args:
        x: (M, K) e4m3, contiguous. K a multiple of 32; M and N are any numbers.
        x_scale: (M, ceil(K / 128)) int32, MN-major: byte b of word c is the exponent of columns 32 (4c + b) and on.
        w: (N, K) e4m3, contiguous.
        w_scale: (N, ceil(K / 128)) int32, as x_scale.

    Returns:
        (M, N) bf16.

    Raises:
        ValueError: shapes or strides that do not fit. TypeError: a dtype.
        NotImplementedError: backend="deep_gemm" where the library does not read this format (Hopper) or size.
    """
    return torch.ops.moe.gemm_nt_mxfp8(x, x_scale, w, w_scale, backend=backend)
