"""moe::quantize: values to fp8 or fp4 with one scale per group or block."""

import torch
from torch import Tensor

from moe_ops.backends import lazy
from moe_ops.meta import quantize as contract
from moe_ops.reference import quantize as reference
from moe_ops.registry import define_op, define_packed_ws

_SCHEMA = (
    'Tensor x, *, str granularity="token", int group=128, str dtype="e4m3", str scale_format="fp32", str backend="auto"'
)

QUANTIZE = define_op(
    "quantize",
    f"({_SCHEMA}) -> (Tensor q, Tensor scale)",
    contract=contract.quantize,
    kernels={"reference": reference.quantize, "triton": lazy("moe_ops.kernels.quantize:quantize")},
)
define_packed_ws(QUANTIZE, f"(Tensor(a!) ws, {_SCHEMA}) -> ()")


def quantize(
    x: Tensor,
    *,
    granularity: str = "token",
    group: int = 128,
    dtype: str = "e4m3",
    scale_format: str = "fp32",
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Quantises: q = round(x / scale), scale = max(amax, 1e-10) / top, top = 448 (e4m3) or 6 (e2m1).

    ue8m0 rounds the scale up to a power of two before dividing (OCP MX v1.0 formats, ceiling rule: nothing saturates).
    Values round to nearest even. A value that is not finite becomes NaN in e4m3 and does not count in amax; e2m1 has
    no NaN, so there it saturates.

    Args:
        x: (M, K) or (E, M, K) bf16, fp16 or fp32.
        granularity: token: one scale per row and `group` columns. block: one per `group` x `group` values.
        group: 16, 32, 64, 128 or 256.
        dtype: e4m3, or e2m1 (two values a byte, the even column in the low nibble).
        scale_format: fp32 or ue8m0.

    Returns:
        q: like x in float8_e4m3fn; or (..., K / 2) int8 for e2m1.
        scale: token: MN-major, (..., M, G) fp32 or (..., M, ceil(G / 4)) int32 with four exponent bytes a word.
            block: (..., ceil(M / group), ceil(K / group)) fp32, powers of two for ue8m0 (see pack_scale).

    Raises:
        ValueError: K is not a multiple of the group. TypeError: x is not a float tensor.
    """
    return torch.ops.moe.quantize(
        x, granularity=granularity, group=group, dtype=dtype, scale_format=scale_format, backend=backend
    )
