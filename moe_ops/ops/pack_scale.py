"""moe::pack_scale: logical scales to the form that a grouped GEMM reads."""

import torch
from torch import Tensor

from moe_ops.backends import lazy
from moe_ops.meta import pack_scale as contract
from moe_ops.reference import pack_scale as reference
from moe_ops.registry import define_op, define_packed_ws

_SCHEMA = 'Tensor scale, SymInt mn, *, int rows_per_scale=1, str scale_format="ue8m0", str backend="auto"'

PACK_SCALE = define_op(
    "pack_scale",
    f"({_SCHEMA}) -> Tensor",
    contract=contract.pack_scale,
    kernels={"reference": reference.pack_scale, "triton": lazy("moe_ops.kernels.pack_scale:pack_scale")},
)
define_packed_ws(PACK_SCALE, f"(Tensor(a!) ws, {_SCHEMA}) -> ()")


def pack_scale(
    scale: Tensor, mn: int, *, rows_per_scale: int = 1, scale_format: str = "ue8m0", backend: str = "auto"
) -> Tensor:
    """Lays scales out as deep_gemm reads them: MN-major, mn padded to 16 bytes, one row of scales per row of values.

    Args:
        scale: (ceil(mn / rows_per_scale), G) or (E, ...) fp32; for ue8m0 also exponent bytes (uint8, float8_e8m0fnu).
        mn: rows of the tensor that the scale belongs to.
        rows_per_scale: rows that share a scale (128 for block-quantised weights); each scale is repeated that often.
        scale_format: ue8m0: int32, byte b of word c is the exponent of group 4c + b, bytes past G are 0. fp32: as is.

    Returns:
        (..., mn, ceil(G / 4)) int32 or (..., mn, G) fp32, strides (..., 1, align(mn, 4)).

    Raises:
        ValueError: an fp32 scale is not a positive power of two and the format is ue8m0 (checked on the CPU).
    """
    return torch.ops.moe.pack_scale(
        scale, mn, rows_per_scale=rows_per_scale, scale_format=scale_format, backend=backend
    )
