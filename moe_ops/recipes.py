"""The four weight recipes: one frozen row each. Nothing else in the package branches on a name."""

from dataclasses import dataclass

import torch

from moe_ops import check

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
SCALE_FORMATS = ("none", "fp32", "ue8m0")
FORMAT_OF_SCALE = {torch.float32: "fp32", torch.int32: "ue8m0"}
"""dtype of prepared scales -> their format."""


@dataclass(frozen=True)
class Recipe:
    """What the weights and the activations of one recipe look like."""

    name: str
    x_dtype: torch.dtype
    """Of the rows that both GEMMs read."""
    x_group: int
    """Columns that share one activation scale; 0 for none."""
    w_dtype: torch.dtype
    w_pack: int
    """Weights in one stored element, along the contracted axis."""
    w_block: tuple[int, int]
    """(rows, columns) of the weight that share one scale; (0, 0) for none."""
    scale_formats: tuple[str, ...]
    """Formats the scales may have, the default first."""
    max_diff: float
    """Largest relative error (Frobenius norm) of the layer against float64 with the same dequantised weights."""

    @property
    def quantised(self) -> bool:
        return self.x_group > 0

    @property
    def fused(self) -> bool:
        """Whether the gathered and direct layouts have kernels for it: bf16, or scales of 128 columns throughout."""
        return self.w_block[1] == self.x_group and self.w_block[0] != 1

    @property
    def granule(self) -> int:
        """K and I must be multiples of it."""
        return max(self.x_group, self.w_block[1], 1)


_E4M3 = torch.float8_e4m3fn

RECIPES: dict[str, Recipe] = {
    row.name: row
    for row in (
        #       name         x_dtype         group w_dtype       pack block      scale formats       max_diff
        Recipe("bf16", torch.bfloat16, 0, torch.bfloat16, 1, (0, 0), ("none",), 0.01),
        Recipe("fp8_block", _E4M3, 128, _E4M3, 1, (128, 128), ("fp32", "ue8m0"), 0.05),
        Recipe("mxfp8", _E4M3, 32, _E4M3, 1, (1, 32), ("ue8m0",), 0.05),
        Recipe("mxfp4", _E4M3, 128, torch.int8, 2, (1, 32), ("ue8m0",), 0.06),
    )
}

DENSE: dict[str, str] = {
    "gemm_nt_fp8": "fp8_block",
    "gemm_nt_mxfp8": "mxfp8",
    "gemm_nt_bf16_fp32": "bf16",
    "hc_prenorm_gemm": "bf16",
}
"""Dense GEMM op -> the recipe of its rows x and of its weight (hc_prenorm_gemm's is float32)."""

SPLIT_BLOCK = 64
"""Columns: hc_prenorm_gemm divides K into ranges of whole blocks of so many, as deep_gemm does."""


def get_recipe(op: str, name: str, scale_format: str | None = None) -> Recipe:
    """The row of this name, or ValueError; with a scale format, also that the recipe has it."""
    check.one_of(op, "recipe", name, tuple(RECIPES))
    recipe = RECIPES[name]
    if scale_format is not None:
        check.one_of(op, "scale_format", scale_format, recipe.scale_formats, f"These are the formats of recipe {name}.")
    return recipe
