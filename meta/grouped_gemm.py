"""Contracts of moe::grouped_gemm_contiguous and moe::grouped_gemm_masked, and of the weights both read."""

import torch

from moe_ops import check
from moe_ops.meta.pack_scale import packed_scale_spec
from moe_ops.meta.quantize import check_rows
from moe_ops.recipes import Recipe, get_recipe
from moe_ops.rows import BLOCK, ceil_div
from moe_ops.spec import TensorSpec

_PREPARE = "Use moe_ops.prepare_weights."


def weight_scale_spec(E: int, N: int, K: int, recipe: Recipe, scale_format: str) -> TensorSpec:
    """Scales of (E, N, K) weights.

    none: empty. fp32: (E, ceil(N / 128), ceil(K / 128)) float32, one a block. ue8m0: one row per weight row,
    (E, N, ceil(K / (4 * columns))) int32, MN-major.
    """
    if scale_format == "none":
        return TensorSpec.contiguous(0, dtype=torch.float32)
    rows, columns = recipe.w_block
    groups = ceil_div(K, columns)
    if scale_format == "fp32":
        return TensorSpec.contiguous(E, ceil_div(N, rows), groups, dtype=torch.float32)
    return packed_scale_spec(E, N, groups, scale_format="ue8m0")


def scale_format_of(op: str, w: str, scale, recipe: Recipe) -> str:
    """The scale format that a prepared weight carries, from the dtype of its scale: float32 or packed int32."""
    if not recipe.quantised:
        check.no_scale(op, f"{w}_scale", scale, recipe.name)
        return "none"
    scale = check.given(op, f"{w}_scale", scale, f"for recipe {recipe.name}")
    kinds = {torch.float32: "fp32", torch.int32: "ue8m0"}
    allowed = [kind for kind, name in kinds.items() if name in recipe.scale_formats]
    check.dtype(op, f"{w}_scale", scale, allowed, f"Recipe {recipe.name} has no other. {_PREPARE}")
    return kinds[scale.dtype]


def check_weight(op: str, name: str, w, scale, shape: tuple, letters: str, recipe: Recipe) -> str:
    """Checks prepared weights of logical shape (E, N, K) and returns their scale format."""
    E, N, K = shape
    check.dtype(op, name, w, (recipe.w_dtype,), f"That is recipe {recipe.name}. {_PREPARE}")
    check.shape(op, name, w, (E, N, K // recipe.w_pack), letters, _PREPARE)
    spec = TensorSpec.contiguous(E, N, K // recipe.w_pack, dtype=recipe.w_dtype)
    check.layout(op, name, w, spec, "contiguous (K-major)", "Call .contiguous() once, at load.")
    check.multiple(op, f"K of {name}", K, recipe.granule, f"Pad K with zeros. {_PREPARE}")
    scale_format = scale_format_of(op, name, scale, recipe)
    if scale_format != "none":
        spec = weight_scale_spec(E, N, K, recipe, scale_format)
        check.shape(op, f"{name}_scale", scale, spec.shape, "(E, rows, groups)", _PREPARE)
        kind = "contiguous" if scale_format == "fp32" else "MN-major"
        check.layout(op, f"{name}_scale", scale, spec, kind, f"It was made contiguous on the way. {_PREPARE}")
    return scale_format


def gemm_spec(*rows, N: int) -> TensorSpec:
    """(..., N) bfloat16, what both GEMMs write."""
    return TensorSpec.contiguous(*rows, N, dtype=torch.bfloat16)


def grouped_gemm_contiguous(*, x, x_scale, w, w_scale, m_indices, recipe, backend) -> tuple[TensorSpec]:
    op = "grouped_gemm_contiguous"
    check.value(x.dim() == 2, op, "x", "of shape (M, K)", lambda: tuple(x.shape), "Pass pre_permute's result.")
    N = _check_operands(op, x, x_scale, w, w_scale, "(M, K)", recipe)
    M = x.shape[0]
    check.multiple(op, "M, the rows of x,", M, BLOCK, "Pad each expert's rows to a whole block.")
    check_m_indices(op, m_indices, M)
    check.same_device(op, x.device, x_scale=x_scale, w=w, w_scale=w_scale, m_indices=m_indices)
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


def _check_operands(op: str, x, x_scale, w, w_scale, letters: str, recipe: str) -> int:
    row = get_recipe(op, recipe)
    check.value(w.dim() == 3, op, "w", "of shape (E, N, K)", lambda: tuple(w.shape), _PREPARE)
    K, N = x.shape[-1], w.shape[1]
    scale_format = check_weight(op, "w", w, w_scale, (w.shape[0], N, K), f"(E, N, K / {row.w_pack})", row)
    if x_scale is not None and row.quantised:
        kinds = {torch.float32: "fp32", torch.int32: "ue8m0"}
        got = kinds.get(x_scale.dtype, str(x_scale.dtype))
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
