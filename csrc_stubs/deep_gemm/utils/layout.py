"""Layouts of scales, and the block size of the contiguous layout."""

import torch

from .._pack import pack_ue8m0, tma_aligned_size, to_mn_major
from ..settings import (
    get_mk_alignment_for_contiguous_layout,
    get_theoretical_mk_alignment_for_contiguous_layout,
    set_mk_alignment_for_contiguous_layout,
)

__all__ = [
    "get_k_alignment_for_contiguous_layout",
    "get_m_alignment_for_contiguous_layout",
    "get_mk_alignment_for_contiguous_layout",
    "get_mn_major_tma_aligned_packed_ue8m0_tensor",
    "get_mn_major_tma_aligned_tensor",
    "get_theoretical_mk_alignment_for_contiguous_layout",
    "get_tma_aligned_size",
    "set_mk_alignment_for_contiguous_layout",
]

get_m_alignment_for_contiguous_layout = get_mk_alignment_for_contiguous_layout
get_k_alignment_for_contiguous_layout = get_mk_alignment_for_contiguous_layout


def get_tma_aligned_size(mn: int, element_size: int) -> int:
    """mn rounded up so that mn elements fill a multiple of 16 bytes.

    Raises:
        ValueError: element_size does not divide 16.
    """
    return tma_aligned_size(mn, element_size)


def get_mn_major_tma_aligned_tensor(sf: torch.Tensor) -> torch.Tensor:
    """fp32 scales, transposed in memory and padded: what sm90 reads.

    Args:
        sf: ([G,] mn, w) fp32, any strides.

    Returns:
        The same values, strides ([w * p,] 1, p) with p = mn rounded up to 4. The same memory if
        sf already has them.

    Raises:
        ValueError: sf is not 2-D or 3-D.
        TypeError: sf is not fp32.
    """
    return to_mn_major("get_mn_major_tma_aligned_tensor", "sf", sf)


def get_mn_major_tma_aligned_packed_ue8m0_tensor(
    sf: torch.Tensor,
    psum_layout: torch.Tensor | None = None,
) -> torch.Tensor:
    """fp32 powers of two, packed four to a word: what sm100 and sm120 read. Works on sm90 too.

    Args:
        sf: ([G,] mn, w) fp32 powers of two.
        psum_layout: (groups,) int32 ends of the groups' rows. Rows outside every group are not
            inspected, and get the byte 0.

    Returns:
        ([G,] mn, ceil(w / 4)) int32, strides ([ceil(w / 4) * p,] 1, p) with p = mn rounded up to
        4. Group 4c + j is byte j of word c; bytes past w are 0.

    Raises:
        ValueError: a scale is not a positive power of two (or zero); strides without a kernel.
        TypeError: sf is not fp32.
    """
    return pack_ue8m0("get_mn_major_tma_aligned_packed_ue8m0_tensor", "sf", sf, psum_layout)
