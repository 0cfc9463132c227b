"""Grouped GEMMs: one b a group, rows of a sorted by group, or a slab of rows a group.

Contiguous: the kernels work in blocks of get_mk_alignment_for_contiguous_layout() rows and look at
the first entry of a block only: its group is everyone's; if it is negative the block is skipped.
Masked: the first masked_m[e] rows of slab e.
"""

import torch

from . import _check
from ._grouped import multiply_contiguous, multiply_masked
from ._matrix import read_matrix
from .scales import Quantised, Recipe, RecipePair, split_pair


def m_grouped_fp8_fp4_gemm_nt_contiguous(
    a: Quantised,
    b: Quantised,
    d: torch.Tensor,
    grouped_layout: torch.Tensor,
    recipe: Recipe | None = None,
    recipe_a: RecipePair | None = None,
    recipe_b: RecipePair | None = None,
    compiled_dims: str = "nk",
    disable_ue8m0_cast: bool = False,
    use_psum_layout: bool = False,
    ensure_zero_padding: bool = True,
    expected_m_for_psum_layout: int | None = None,
) -> None:
    """d[i] = a[i] @ b[group of i's block].T.

    Args:
        a: (m, k) e4m3, or (m, k / 2) int8 on sm100 and sm120, K-major; and its scale.
        b: (num_groups, n, k) likewise, K-major on sm90; and its scale.
        d: (m, n) bf16, row-major; rows of skipped blocks are not touched.
        grouped_layout: (m,) int32, the group of each row, negative for none. Or, with
            use_psum_layout, (num_groups,) int32: group e is rows [align(end[e - 1]), end[e]).
        recipe, recipe_a, recipe_b: see scales.py. None: by the dtype of b's scale.
        compiled_dims: no effect here.
        disable_ue8m0_cast: only False has kernels on sm100 and sm120.
        ensure_zero_padding: with use_psum_layout, compute the rest of a group's last block as well
            (zero where a is zero); otherwise those rows are not touched.
        expected_m_for_psum_layout: a hint; no effect here.

    Raises:
        ValueError, TypeError: shape, strides, scales, group ids; dtype, device.
        NotImplementedError: a dtype or recipe this card has no kernel for.
    """
    _contiguous_fp8(
        "m_grouped_fp8_fp4_gemm_nt_contiguous",
        (a, b, d, grouped_layout),
        (recipe, recipe_a, recipe_b, disable_ue8m0_cast),
        (use_psum_layout, ensure_zero_padding, expected_m_for_psum_layout),
    )


def m_grouped_fp8_fp4_gemm_nn_contiguous(
    a: Quantised,
    b: Quantised,
    d: torch.Tensor,
    grouped_layout: torch.Tensor,
    recipe: Recipe | None = None,
    recipe_a: RecipePair | None = None,
    recipe_b: RecipePair | None = None,
    compiled_dims: str = "nk",
    disable_ue8m0_cast: bool = False,
    use_psum_layout: bool = False,
    ensure_zero_padding: bool = True,
) -> None:
    """m_grouped_fp8_fp4_gemm_nt_contiguous for b (num_groups, k, n) and its scale transposed."""
    op = "m_grouped_fp8_fp4_gemm_nn_contiguous"
    values, scale = split_pair(op, "b", b)
    _check.rank(op, "b", values, 3, "(num_groups, k, n)")
    _check.rank(op, "b's scale", scale, 3, "(num_groups, k groups, n groups)")
    _contiguous_fp8(
        op,
        (a, (values.mT, scale.mT), d, grouped_layout),
        (recipe, recipe_a, recipe_b, disable_ue8m0_cast),
        (use_psum_layout, ensure_zero_padding, None),
    )


def _contiguous_fp8(op: str, tensors: tuple, recipes: tuple, psum: tuple) -> None:
    a, b, d, grouped_layout = tensors
    (a_values, a_scale), (b_values, b_scale) = split_pair(op, "a", a), split_pair(op, "b", b)
    _check.same_device(
        op,
        a=a_values,
        a_scale=a_scale,
        b=b_values,
        b_scale=b_scale,
        d=d,
        grouped_layout=grouped_layout,
    )
    left = read_matrix(op, "a", a_values, 2, "(m, k)")
    right = read_matrix(op, "b", b_values, 3, "(num_groups, n, k)")
    multiply_contiguous(op, left, right, (a_scale, b_scale, *recipes), d, grouped_layout, *psum)


def m_grouped_fp8_fp4_gemm_nt_masked(
    a: Quantised,
    b: Quantised,
    d: torch.Tensor,
    masked_m: torch.Tensor,
    expected_m: int,
    recipe: Recipe | None = None,
    recipe_a: RecipePair | None = None,
    recipe_b: RecipePair | None = None,
    compiled_dims: str = "nk",
    disable_ue8m0_cast: bool = False,
) -> None:
    """d[e, :masked_m[e]] = a[e, :masked_m[e]] @ b[e].T; later rows are not touched.

    Args:
        a: (num_groups, m, k) e4m3, or (.., k / 2) int8 on sm100 and sm120, K-major; and its scale.
        b: (num_groups, n, k) likewise, K-major; and its scale.
        d: (num_groups, m, n) bf16, row-major.
        masked_m: (num_groups,) int32 rows that count.
        expected_m: a positive hint for tile sizes; no effect here.
        recipe, recipe_a, recipe_b: see scales.py. None: by the dtype of b's scale.

    Raises:
        ValueError, TypeError: shape, strides, scales, counts; dtype, device.
        NotImplementedError: a dtype or recipe this card has no kernel for.
    """
    op = "m_grouped_fp8_fp4_gemm_nt_masked"
    (a_values, a_scale), (b_values, b_scale) = split_pair(op, "a", a), split_pair(op, "b", b)
    _check.same_device(
        op,
        a=a_values,
        a_scale=a_scale,
        b=b_values,
        b_scale=b_scale,
        d=d,
        masked_m=masked_m,
    )
    left = read_matrix(op, "a", a_values, 3, "(num_groups, m, k)")
    right = read_matrix(op, "b", b_values, 3, "(num_groups, n, k)")
    scales = (a_scale, b_scale, recipe, recipe_a, recipe_b, disable_ue8m0_cast)
    multiply_masked(op, left, right, scales, d, masked_m, expected_m)


def m_grouped_bf16_gemm_nt_contiguous(
    a: torch.Tensor,
    b: torch.Tensor,
    d: torch.Tensor,
    grouped_layout: torch.Tensor,
    compiled_dims: str = "nk",
    use_psum_layout: bool = False,
    ensure_zero_padding: bool = True,
    expected_m_for_psum_layout: int | None = None,
) -> None:
    """m_grouped_fp8_fp4_gemm_nt_contiguous for bf16 a (m, k), b (num_groups, n, k), no scales."""
    op = "m_grouped_bf16_gemm_nt_contiguous"
    psum = (use_psum_layout, ensure_zero_padding, expected_m_for_psum_layout)
    _contiguous_bf16(op, a, b, d, grouped_layout, psum)


def m_grouped_bf16_gemm_nn_contiguous(
    a: torch.Tensor,
    b: torch.Tensor,
    d: torch.Tensor,
    grouped_layout: torch.Tensor,
    compiled_dims: str = "nk",
    use_psum_layout: bool = False,
    ensure_zero_padding: bool = True,
) -> None:
    """m_grouped_bf16_gemm_nt_contiguous for b (num_groups, k, n)."""
    op = "m_grouped_bf16_gemm_nn_contiguous"
    _check.rank(op, "b", b, 3, "(num_groups, k, n)")
    psum = (use_psum_layout, ensure_zero_padding, None)
    _contiguous_bf16(op, a, b.mT, d, grouped_layout, psum)


def _contiguous_bf16(
    op: str,
    a: torch.Tensor,
    b: torch.Tensor,
    d: torch.Tensor,
    grouped_layout: torch.Tensor,
    psum: tuple,
) -> None:
    _check.same_device(op, a=a, b=b, d=d, grouped_layout=grouped_layout)
    left = read_matrix(op, "a", a, 2, "(m, k)")
    right = read_matrix(op, "b", b, 3, "(num_groups, n, k)")
    multiply_contiguous(op, left, right, None, d, grouped_layout, *psum)


def m_grouped_bf16_gemm_nt_masked(
    a: torch.Tensor,
    b: torch.Tensor,
    d: torch.Tensor,
    masked_m: torch.Tensor,
    expected_m: int,
    compiled_dims: str = "nk",
) -> None:
    """m_grouped_fp8_fp4_gemm_nt_masked for bf16 a and b, no scales."""
    op = "m_grouped_bf16_gemm_nt_masked"
    _check.same_device(op, a=a, b=b, d=d, masked_m=masked_m)
    left = read_matrix(op, "a", a, 3, "(num_groups, m, k)")
    right = read_matrix(op, "b", b, 3, "(num_groups, n, k)")
    multiply_masked(op, left, right, None, d, masked_m, expected_m)
