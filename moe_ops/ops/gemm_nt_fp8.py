"""moe::gemm_nt_fp8: a dense product of fp8 operands with a scale per 128 columns and per 128x128 block."""

import torch
from torch import Tensor

from moe_ops.backends import lazy
from moe_ops.meta import gemm_nt_fp8 as contract
from moe_ops.reference import gemm_nt_fp8 as reference
from moe_ops.registry import define_op, define_packed_ws

_SCHEMA = 'Tensor x, Tensor x_scale, Tensor w, Tensor w_scale, *, str backend="auto"'

GEMM_NT_FP8 = define_op(
    "gemm_nt_fp8",
    f"({_SCHEMA}) -> Tensor",
    contract=contract.gemm_nt_fp8,
    kernels={
        "reference": reference.gemm_nt_fp8,
        "triton": lazy("moe_ops.kernels.gemm_nt_fp8:gemm_nt_fp8"),
        "deep_gemm": lazy("moe_ops.kernels.deep_gemm_dense:gemm_nt_fp8"),
    },
)
define_packed_ws(GEMM_NT_FP8, f"(Tensor(a!) ws, {_SCHEMA}) -> ()")


def gemm_nt_fp8(x: Tensor, x_scale: Tensor, w: Tensor, w_scale: Tensor, *, backend: str = "auto") -> Tensor:
    """out = dequantise(x) @ dequantise(w).T of recipe fp8_block, accumulated in float32, rounded once to bf16.

    For the linear layers around the experts, such as a dense MLP's down projection.

        x_q, x_scale = quantize(x)
        w_q, w_scale = quantize(w, granularity="block")
    or, in powers of two,
        x_q, x_scale = quantize(x, scale_format="ue8m0")
        w_q, scale = quantize(w, granularity="block", scale_format="ue8m0")
        w_scale = pack_scale(scale, N, rows_per_scale=128)

    Args:
        x: (M, K) e4m3, contiguous. K a multiple of 128; M and N are any numbers.
        x_scale: MN-major, in the format of w_scale: (M, K / 128) fp32, or (M, ceil(K / 512)) int32 with four UE8M0
            bytes a word.
        w: (N, K) e4m3, contiguous.
        w_scale: (ceil(N / 128), K / 128) fp32, contiguous; or (N, ceil(K / 512)) int32, MN-major, a row per row of w.

    Returns:
        (M, N) bf16.

    Raises:
        ValueError: shapes, strides or scale formats that do not fit. TypeError: a dtype.
        NotImplementedError: backend="deep_gemm" where the library does not read this format or size.
    """
    return torch.ops.moe.gemm_nt_fp8(x, x_scale, w, w_scale, backend=backend)
