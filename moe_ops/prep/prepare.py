"""prepare_weights: float weights, or quantised ones with plain scales, to MoEWeights."""

import torch
from torch import Tensor

from moe_ops import check
from moe_ops.arch import default_scale_format
from moe_ops.ops import pack_scale, quantize
from moe_ops.prep.weights import MoEWeights
from moe_ops.recipes import FLOATS, Recipe, get_recipe
from moe_ops.rows import ceil_div

_OP = "prepare_weights"


def prepare_weights(
    w13: Tensor,
    w2: Tensor,
    *,
    recipe: str,
    scale_format: str | None = None,
    w13_scale: Tensor | None = None,
    w2_scale: Tensor | None = None,
    w13_bias: Tensor | None = None,
    w2_bias: Tensor | None = None,
) -> MoEWeights:
    """Quantises float experts, or lays out already quantised ones, for a recipe. The inputs are not changed.

    Args:
        w13: (E, 2 I, K), gate rows over up rows. Float (bf16, fp16, fp32), or quantised: float8_e4m3fn for fp8_block
            and mxfp8; for mxfp4 two codes a byte, low nibble = even column, (E, 2 I, K / 2) int8, uint8 or
            float4_e2m1fn_x2.
        w2: (E, K, I), likewise.
        recipe: bf16, fp8_block, mxfp8 or mxfp4.
        scale_format: fp32 or ue8m0. None: what the device's GEMMs read (fp8_block: fp32 on CPU and Hopper, ue8m0 from
            Blackwell on); the MX recipes are ue8m0 always.
        w13_scale, w2_scale: of quantised weights, in plain form: fp8_block (E, ceil(N / 128), ceil(K / 128)) fp32;
            mxfp8, mxfp4 (E, N, K / 32) exponent bytes (uint8, float8_e8m0fnu) or fp32 powers of two.
        w13_bias, w2_bias: (E, 2 I) and (E, K) float, kept as they are.

    Raises:
        ValueError: a size is not a multiple of the recipe's group, a scale is missing, or fp32 scales that are not
            powers of two are asked to become ue8m0. TypeError: a dtype that the recipe cannot come from.
    """
    row = get_recipe(_OP, recipe, scale_format)
    wanted = scale_format or default_scale_format(row, w13.device)
    w13, w13_scale = _prepare("w13", w13, w13_scale, row, wanted)
    w2, w2_scale = _prepare("w2", w2, w2_scale, row, wanted)
    return MoEWeights(w13, w13_scale, w2, w2_scale, recipe, wanted, w13_bias, w2_bias)


def _prepare(name: str, w: Tensor, scale: Tensor | None, recipe: Recipe, scale_format: str):
    check.value(w.dim() == 3, _OP, name, "of 3 axes (E, N, K)", lambda: tuple(w.shape), "Stack the experts.")
    if w.dtype not in FLOATS:
        return _lay_out(name, w, scale, recipe, scale_format)
    check.value(scale is None, _OP, f"{name}_scale", "None for float weights", "a tensor", "Drop it.")
    for axis, size in (("last", w.shape[2]), ("middle", w.shape[1])):
        check.multiple(_OP, f"the {axis} axis of {name}", size, recipe.granule, "Pad it with zeros.")
    if not recipe.quantised:
        return w.to(recipe.w_dtype).contiguous(), None
    blocks = recipe.w_block[0] > 1
    values, scales = quantize(
        w,
        granularity="block" if blocks else "token",
        group=recipe.w_block[1],
        dtype="e2m1" if recipe.w_pack == 2 else "e4m3",
        scale_format=scale_format,
    )
    return values, _format(scales, w.shape[1], recipe, scale_format) if blocks else scales


def _lay_out(name: str, w: Tensor, scale: Tensor | None, recipe: Recipe, scale_format: str):
    """Quantised weights: values as they are, plain scales in the wanted format."""
    codes = (torch.int8, torch.uint8, torch.float4_e2m1fn_x2)
    allowed = codes if recipe.w_pack == 2 else (recipe.w_dtype,)
    check.dtype(_OP, name, w, (*FLOATS, *allowed), f"Recipe {recipe.name} is made from these.")
    scale = check.given(_OP, f"{name}_scale", scale, "beside quantised weights")
    E, N, K = w.shape[0], w.shape[1], w.shape[2] * recipe.w_pack
    check.multiple(_OP, f"K of {name}", K, recipe.granule, "Pad values and scales with zeros.")
    rows, columns = recipe.w_block
    plain = (E, ceil_div(N, rows), ceil_div(K, columns))
    check.shape(_OP, f"{name}_scale", scale, plain, f"(E, N / {rows}, K / {columns})", "Pass the checkpoint's.")
    return w.view(recipe.w_dtype).contiguous(), _format(scale, N, recipe, scale_format)


def _format(scale: Tensor, N: int, recipe: Recipe, scale_format: str) -> Tensor:
    rows, _ = recipe.w_block
    if scale_format == "fp32":
        check.dtype(_OP, "scales", scale, (torch.float32,), "Or choose scale_format='ue8m0'.")
        return scale.contiguous()
    return pack_scale(scale, N, rows_per_scale=rows)
