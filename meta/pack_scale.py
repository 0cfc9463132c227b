"""Contract of moe::pack_scale."""

import torch

from moe_ops import check
from moe_ops.recipes import SCALE_FORMATS
from moe_ops.rows import ceil_div
from moe_ops.spec import TensorSpec

BYTES = (torch.uint8, torch.float8_e8m0fnu)


def packed_scale_spec(*shape, scale_format: str) -> TensorSpec:
    """(..., mn, groups) logical scales in the form a grouped GEMM reads: MN-major fp32, or four UE8M0 bytes a word."""
    *rows, groups = shape
    if scale_format == "fp32":
        return TensorSpec.mn_major(*rows, groups, dtype=torch.float32)
    return TensorSpec.mn_major(*rows, ceil_div(groups, 4), dtype=torch.int32)


def pack_scale(*, scale, mn, rows_per_scale, scale_format, backend) -> tuple[TensorSpec]:
    op = "pack_scale"
    check.value(
        scale.dim() in (2, 3), op, "scale", "of 2 or 3 axes", lambda: tuple(scale.shape), "Flatten or unsqueeze it."
    )
    check.one_of(op, "scale_format", scale_format, SCALE_FORMATS[1:])
    allowed = (torch.float32, *BYTES) if scale_format == "ue8m0" else (torch.float32,)
    check.dtype(op, "scale", scale, allowed, "Exponent bytes can only be packed as ue8m0.")
    check.value(rows_per_scale >= 1, op, "rows_per_scale", "at least 1", rows_per_scale, "1 means a scale per row.")
    *batch, rows, groups = scale.shape
    check.value(groups >= 1, op, "scale", "of at least one group", lambda: tuple(scale.shape), "Skip the call.")
    check.value(
        rows == ceil_div(mn, rows_per_scale),
        op,
        "scale",
        "of ceil(mn / rows_per_scale) rows",
        lambda: f"{rows} rows for mn={mn}, rows_per_scale={rows_per_scale}",
        "Check that the scale belongs to this tensor.",
    )
    return (packed_scale_spec(*batch, mn, groups, scale_format=scale_format),)
