"""Contracts of moe::grouped_gemm_{contiguous,masked,gathered,direct}, and of the weights they read."""

import torch

from moe_ops import check
from moe_ops.meta.pack_scale import packed_scale_spec
from moe_ops.meta.quantize import check_rows
from moe_ops.recipes import FORMAT_OF_SCALE, Recipe, get_recipe
from moe_ops.rows import BLOCK, ceil_div
from moe_ops.spec import TensorSpec
from moe_ops.weight_format import FORMATS, WeightFormat

_PREPARE = "Use moe_ops.prepare_weights."

BLOCKS_M = (16, 32, 64, 128)
"""Rows that a tile of the gathered layout may have."""


def weight_scale_spec(E: int, N: int, K: int, recipe: Recipe, scale_format: str) -> TensorSpec:
    """Scales of (E, N, K) weights. none: empty. Else those of E matrices."""
    if scale_format == "none":
        return TensorSpec.contiguous(0, dtype=torch.float32)
    return matrix_scale_spec(E, N, K, recipe=recipe, scale_format=scale_format)


def matrix_scale_spec(*shape, recipe: Recipe, scale_format: str) -> TensorSpec:
    """Scales of (..., N, K) weights.

    fp32: (..., ceil(N / 128), ceil(K / 128)) float32, contiguous, one a block. ue8m0: one row per weight row,
    (..., N, ceil(K / (4 * columns))) int32, MN-major.
    """
    *batch, N, K = shape
    rows, columns = recipe.w_block
    groups = ceil_div(K, columns)
    if scale_format == "fp32":
        return TensorSpec.contiguous(*batch, ceil_div(N, rows), groups, dtype=torch.float32)
    return packed_scale_spec(*batch, N, groups, scale_format=scale_format)


def scale_format_of(op: str, w: str, scale, recipe: Recipe) -> str:
    """The scale format that a prepared weight carries, from the dtype of its scale: float32 or packed int32."""
    if not recipe.quantised:
        check.no_scale(op, f"{w}_scale", scale, recipe.name)
        return "none"
    scale = check.given(op, f"{w}_scale", scale, f"for recipe {recipe.name}")
    allowed = [dtype for dtype, name in FORMAT_OF_SCALE.items() if name in recipe.scale_formats]
    check.dtype(op, f"{w}_scale", scale, allowed, f"Recipe {recipe.name} has no other. {_PREPARE}")
    return FORMAT_OF_SCALE[scale.dtype]


def check_format(op: str, name: str, recipe: Recipe) -> WeightFormat:
    """The row of this weight format, which the recipe must have."""
    check.one_of(op, "weight_format", name, tuple(FORMATS))
    form, fix = FORMATS[name], "Others are stored as they are."
    check.value(not form.repacked or recipe.w_pack == 2, op, "recipe", f"mxfp4 for {name} weights", recipe.name, fix)
    return form


def check_weight(
    op: str, name: str, w, scale, shape: tuple, letters: str, recipe: Recipe, weight_format: str = "natural"
) -> str:
    """Checks prepared weights of logical shape (E, N, K) and returns their scale format."""
    E, N, K = shape
    check.dtype(op, name, w, (recipe.w_dtype,), f"That is recipe {recipe.name}. {_PREPARE}")
    form = FORMATS[weight_format]
    spec = form.w_spec(E, N, K) if form.repacked else _natural(recipe, E, N, K)
    check.shape(op, name, w, spec.shape, letters if not form.repacked else "(E, K / 64, N, 32)", _PREPARE)
    check.layout(op, name, w, spec, "contiguous (K-major)", "Call .contiguous() once, at load.")
    check.multiple(op, f"K of {name}", K, recipe.granule, f"Pad K with zeros. {_PREPARE}")
    scale_format = scale_format_of(op, name, scale, recipe)
    if scale_format != "none":
        spec = weight_scale_spec(E, N, K, recipe, scale_format)
        check.shape(op, f"{name}_scale", scale, spec.shape, "(E, rows, groups)", _PREPARE)
        kind = "contiguous" if scale_format == "fp32" else "MN-major"
        check.layout(op, f"{name}_scale", scale, spec, kind, f"It was made contiguous on the way. {_PREPARE}")
    return scale_format


def _natural(recipe: Recipe, E, N, K) -> TensorSpec:
    return TensorSpec.contiguous(E, N, K // recipe.w_pack, dtype=recipe.w_dtype)


def gemm_spec(*rows, N: int) -> TensorSpec:
    """(..., N) bfloat16, what both GEMMs write."""
    return TensorSpec.contiguous(*rows, N, dtype=torch.bfloat16)


def grouped_gemm_contiguous(*, x, x_scale, w, w_scale, m_indices, ends, recipe, backend) -> tuple[TensorSpec]:
    op = "grouped_gemm_contiguous"
    check.value(x.dim() == 2, op, "x", "of shape (M, K)", lambda: tuple(x.shape), "Pass pre_permute's result.")
    N = _check_operands(op, x, x_scale, w, w_scale, "(M, K)", recipe)
    M = x.shape[0]
    check.multiple(op, "M, the rows of x,", M, BLOCK, "Pad each expert's rows to a whole block.")
    check_m_indices(op, m_indices, M)
    if ends is not None:
        check.dtype(op, "ends", ends, (torch.int32,), "Use ends.int().")
        check.shape(op, "ends", ends, (w.shape[0],), "(E,)", "The row behind each expert's last.")
    check.same_device(op, x.device, x_scale=x_scale, w=w, w_scale=w_scale, m_indices=m_indices, ends=ends)
    return (gemm_spec(M, N=N),)


def grouped_gemm_masked(*, x, x_scale, w, w_scale, masked_m, expected_m, recipe, backend) -> tuple[TensorSpec]:
    op = "grouped_gemm_masked"
    check.value(x.dim() == 3, op, "x", "of shape (E, m_max, K)", lambda: tuple(x.shape), "Pass pre_permute's result.")
    N = _check_operands(op, x, x_scale, w, w_scale, "(E, m_max, K)", recipe)
    check.value(x.shape[0] == w.shape[0], op, "x", f"of E={w.shape[0]} slabs", x.shape[0], "One slab per expert of w.")
    check_masked_m(op, masked_m, x.shape[0])
    check.value(expected_m >= 0, op, "expected_m", "at least 0", expected_m, "It is a hint: mean rows per expert.")
    check.same_device(op, x.device, x_scale=x_scale, w=w, w_scale=w_scale, masked_m=masked_m)
    return (gemm_spec(x.shape[0], x.shape[1], N=N),)


def grouped_gemm_gathered(
    *, x, x_scale, tiles, w, w_scale, block_m, recipe, weight_format, backend
) -> tuple[TensorSpec]:
    op = "grouped_gemm_gathered"
    check.value(x.dim() == 2, op, "x", "of shape (R, K)", lambda: tuple(x.shape), "Pass gated_gemm_gathered's result.")
    N = _check_operands(op, x, x_scale, w, w_scale, "(R, K)", recipe, weight_format)
    check_fused(op, get_recipe(op, recipe), N, x.shape[1], weight_format)
    check_tiles(op, tiles, block_m)
    check.same_device(op, x.device, x_scale=x_scale, tiles=tiles, w=w, w_scale=w_scale)
    return (gemm_spec(x.shape[0], N=N),)


def grouped_gemm_direct(*, x, topk_ids, w, w_scale, recipe, scale_format, expert_start, backend) -> tuple[TensorSpec]:
    op = "grouped_gemm_direct"
    row = get_recipe(op, recipe, scale_format)
    check.value(x.dim() == 2, op, "x", "of shape (R, K)", lambda: tuple(x.shape), "Pass gated_gemm_direct's result.")
    check.dtype(op, "x", x, (torch.float32,), "Pass gated_gemm_direct's result.")
    check.layout(op, "x", x, TensorSpec.contiguous(*x.shape, dtype=x.dtype), "contiguous", "Call .contiguous() on it.")
    check.value(w.dim() == 3, op, "w", "of shape (E, N, K)", lambda: tuple(w.shape), _PREPARE)
    E, N, K = w.shape[0], w.shape[1], x.shape[1]
    check_fused(op, row, N, K)
    got = check_weight(op, "w", w, w_scale, (E, N, K), f"(E, N, K / {row.w_pack})", row)
    check.value(got == scale_format, op, "scale_format", f"that of w_scale, {got}", scale_format, "Pass it.")
    check.value(topk_ids.dim() == 2, op, "topk_ids", "of shape (T, top_k)", lambda: tuple(topk_ids.shape), "Unflatten.")
    check.dtype(op, "topk_ids", topk_ids, (torch.int32, torch.int64), "Use topk_ids.int().")
    routes = topk_ids.shape[0] * topk_ids.shape[1]
    check.shape(op, "x", x, (routes, K), "(R, K)", "A row per route of topk_ids.")
    check.value(expert_start >= 0, op, "expert_start", "at least 0", expert_start, "It is this rank's first expert id.")
    check.same_device(op, x.device, topk_ids=topk_ids, w=w, w_scale=w_scale)
    return (gemm_spec(x.shape[0], N=N),)


def check_fused(op: str, recipe: Recipe, N, K, weight_format: str = "natural") -> None:
    """What the gathered and direct layouts can compute: N here is of one half of a gated weight."""
    fix = "Others run in the contiguous and masked layouts."
    fused = recipe.fused or FORMATS[weight_format].repacked
    check.value(fused, op, "recipe", "bf16, fp8_block or repacked mxfp4", recipe.name, fix)
    for name, size in (("N", N), ("K", K)):
        check.multiple(op, f"{name} of w", size, BLOCK, fix)


def check_tiles(op: str, tiles, block_m: int) -> None:
    check.one_of(op, "block_m", block_m, BLOCKS_M)
    check.dtype(op, "tiles", tiles, (torch.int32,), "Pass pre_permute_gathered's result.")
    check.shape(op, "tiles", tiles, (3, None), "(3, tiles)", "Pass pre_permute_gathered's result.")
    spec = TensorSpec.contiguous(*tiles.shape, dtype=tiles.dtype)
    check.layout(op, "tiles", tiles, spec, "contiguous", "Pass pre_permute_gathered's result.")


def _check_operands(op: str, x, x_scale, w, w_scale, letters: str, recipe: str, weight_format: str = "natural") -> int:
    row = get_recipe(op, recipe)
    form = check_format(op, weight_format, row)
    check.value(w.dim() == 3 + form.repacked, op, "w", "of shape (E, N, K)", lambda: tuple(w.shape), _PREPARE)
    K, N = x.shape[-1], form.sizes(w, row.w_pack)[1]
    letters_of_w = f"(E, N, K / {row.w_pack})"
    scale_format = check_weight(op, "w", w, w_scale, (w.shape[0], N, K), letters_of_w, row, weight_format)
    if x_scale is not None and row.quantised:
        got = FORMAT_OF_SCALE.get(x_scale.dtype, str(x_scale.dtype))
        check.value(
            got == scale_format,
            op,
            "x_scale",
            f"in the scale format of w_scale, {scale_format}",
            got,
            "Quantise x with the scale_format of the prepared weights.",
        )
    check_rows(op, "x", x, x_scale, tuple(x.shape), letters, row, scale_format)
    return N


def check_m_indices(op: str, m_indices, M) -> None:
    check.dtype(op, "m_indices", m_indices, (torch.int32,), "Use m_indices.int().")
    check.shape(op, "m_indices", m_indices, (M,), "(M,)", "One expert per row, -1 for padding.")


def check_masked_m(op: str, masked_m, E) -> None:
    check.dtype(op, "masked_m", masked_m, (torch.int32,), "Use masked_m.int().")
    check.shape(op, "masked_m", masked_m, (E,), "(E,)", "Valid rows of each expert's slab.")
