"""Signatures of sgl-deep-gemm 0.2.0, as far as the stand-in goes. Shapes: the docstrings."""

from contextlib import AbstractContextManager

import torch

from . import settings as settings
from . import testing as testing
from . import utils as utils
from .scales import Quantised, Recipe, RecipePair
from .utils import *  # noqa: F403

__version__: str

def arch(major: int) -> AbstractContextManager[None]: ...
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
) -> None: ...
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
) -> None: ...
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
) -> None: ...
def m_grouped_bf16_gemm_nt_contiguous(
    a: torch.Tensor,
    b: torch.Tensor,
    d: torch.Tensor,
    grouped_layout: torch.Tensor,
    compiled_dims: str = "nk",
    use_psum_layout: bool = False,
    ensure_zero_padding: bool = True,
    expected_m_for_psum_layout: int | None = None,
) -> None: ...
def m_grouped_bf16_gemm_nn_contiguous(
    a: torch.Tensor,
    b: torch.Tensor,
    d: torch.Tensor,
    grouped_layout: torch.Tensor,
    compiled_dims: str = "nk",
    use_psum_layout: bool = False,
    ensure_zero_padding: bool = True,
) -> None: ...
def m_grouped_bf16_gemm_nt_masked(
    a: torch.Tensor,
    b: torch.Tensor,
    d: torch.Tensor,
    masked_m: torch.Tensor,
    expected_m: int,
    compiled_dims: str = "nk",
) -> None: ...
def fp8_fp4_gemm_nt(
    a: Quantised,
    b: Quantised,
    d: torch.Tensor,
    c: torch.Tensor | None = None,
    recipe: Recipe | None = None,
    recipe_a: RecipePair | None = None,
    recipe_b: RecipePair | None = None,
    compiled_dims: str = "",
    disable_ue8m0_cast: bool = False,
    alpha: float | None = None,
) -> None: ...
def fp8_fp4_gemm_nn(
    a: Quantised,
    b: Quantised,
    d: torch.Tensor,
    c: torch.Tensor | None = None,
    recipe: Recipe | None = None,
    recipe_a: RecipePair | None = None,
    recipe_b: RecipePair | None = None,
    compiled_dims: str = "",
    disable_ue8m0_cast: bool = False,
    alpha: float | None = None,
) -> None: ...
def fp8_fp4_gemm_tn(
    a: Quantised,
    b: Quantised,
    d: torch.Tensor,
    c: torch.Tensor | None = None,
    recipe: Recipe | None = None,
    recipe_a: RecipePair | None = None,
    recipe_b: RecipePair | None = None,
    compiled_dims: str = "",
    disable_ue8m0_cast: bool = False,
    alpha: float | None = None,
) -> None: ...
def fp8_fp4_gemm_tt(
    a: Quantised,
    b: Quantised,
    d: torch.Tensor,
    c: torch.Tensor | None = None,
    recipe: Recipe | None = None,
    recipe_a: RecipePair | None = None,
    recipe_b: RecipePair | None = None,
    compiled_dims: str = "",
    disable_ue8m0_cast: bool = False,
    alpha: float | None = None,
) -> None: ...
def bf16_gemm_nt(
    a: torch.Tensor,
    b: torch.Tensor,
    d: torch.Tensor,
    c: torch.Tensor | None = None,
    compiled_dims: str = "",
    alpha: float | None = None,
) -> None: ...
def bf16_gemm_nn(
    a: torch.Tensor,
    b: torch.Tensor,
    d: torch.Tensor,
    c: torch.Tensor | None = None,
    compiled_dims: str = "",
    alpha: float | None = None,
) -> None: ...
def bf16_gemm_tn(
    a: torch.Tensor,
    b: torch.Tensor,
    d: torch.Tensor,
    c: torch.Tensor | None = None,
    compiled_dims: str = "",
    alpha: float | None = None,
) -> None: ...
def bf16_gemm_tt(
    a: torch.Tensor,
    b: torch.Tensor,
    d: torch.Tensor,
    c: torch.Tensor | None = None,
    compiled_dims: str = "",
    alpha: float | None = None,
) -> None: ...
def tf32_hc_prenorm_gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    d: torch.Tensor,
    sqr_sum: torch.Tensor,
    num_splits: int | None = None,
) -> None: ...
def transform_sf_into_required_layout(
    sf: torch.Tensor,
    mn: int,
    k: int,
    recipe: Recipe | RecipePair,
    num_groups: int | None = None,
    is_sfa: bool | None = None,
    disable_ue8m0_cast: bool = False,
    psum_layout: torch.Tensor | None = None,
) -> torch.Tensor: ...
def set_num_sms(new_num_sms: int) -> None: ...
def get_num_sms() -> int: ...
def set_tc_util(new_tc_util: int) -> None: ...
def get_tc_util() -> int: ...
def set_pdl(new_enable_pdl: bool) -> None: ...
def get_pdl() -> bool: ...
def use_deterministic_algorithms(new_value: bool) -> None: ...
def get_deterministic_algorithms() -> bool: ...
def set_ignore_compile_dims(new_value: bool) -> None: ...
def set_block_size_multiple_of(value: int | tuple[int, int]) -> None: ...

fp4_gemm_nt = fp8_fp4_gemm_nt
fp8_gemm_nt = fp8_fp4_gemm_nt
fp8_gemm_nn = fp8_fp4_gemm_nn
fp8_gemm_tn = fp8_fp4_gemm_tn
fp8_gemm_tt = fp8_fp4_gemm_tt
m_grouped_fp4_gemm_nt_contiguous = m_grouped_fp8_fp4_gemm_nt_contiguous
m_grouped_fp8_gemm_nt_contiguous = m_grouped_fp8_fp4_gemm_nt_contiguous
m_grouped_fp8_gemm_nn_contiguous = m_grouped_fp8_fp4_gemm_nn_contiguous
m_grouped_fp4_gemm_nt_masked = m_grouped_fp8_fp4_gemm_nt_masked
m_grouped_fp8_gemm_nt_masked = m_grouped_fp8_fp4_gemm_nt_masked
fp8_m_grouped_gemm_nt_masked = m_grouped_fp8_fp4_gemm_nt_masked
bf16_m_grouped_gemm_nt_masked = m_grouped_bf16_gemm_nt_masked
