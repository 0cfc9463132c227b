"""Reference of moe::grouped_gemm_contiguous and moe::grouped_gemm_masked: dequantise, multiply in float32, round once.

Each expert's valid rows go through one matrix product in slot order, whatever the layout: both give the same bits.
"""

import torch

from moe_ops.recipes import Recipe, get_recipe
from moe_ops.reference.bounds import check_counts
from moe_ops.reference.quantize import dequantize_rows, dequantize_weight
from moe_ops.rows import BLOCK


def grouped_gemm_contiguous(outputs, *, x, x_scale, w, w_scale, m_indices, recipe) -> None:
    (out,) = outputs
    row = get_recipe("grouped_gemm_contiguous", recipe)
    _check_labels(m_indices, len(w))
    for expert in m_indices[m_indices >= 0].unique().tolist():
        rows = (m_indices == expert).nonzero().flatten()
        scale = x_scale[rows] if row.quantised else None
        out[rows] = _product(_take(x, rows), scale, w, w_scale, expert, row)


def grouped_gemm_masked(outputs, *, x, x_scale, w, w_scale, masked_m, expected_m, recipe) -> None:
    (out,) = outputs
    row = get_recipe("grouped_gemm_masked", recipe)
    check_counts("grouped_gemm_masked", masked_m, x.shape[1])
    for expert, valid in enumerate(masked_m.tolist()):
        if valid:
            scale = x_scale[expert, :valid] if row.quantised else None
            out[expert, :valid] = _product(x[expert, :valid], scale, w, w_scale, expert, row)


def _product(x, x_scale, w, w_scale, expert: int, recipe: Recipe) -> torch.Tensor:
    weight = dequantize_weight(w[expert], w_scale[expert] if recipe.quantised else None, recipe)
    return (dequantize_rows(x, x_scale, recipe) @ weight.T).to(torch.bfloat16)


def _take(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """x[rows] for any dtype: torch cannot index fp8 on a CPU."""
    return x.view(torch.uint8)[rows].view(x.dtype) if x.dtype.itemsize == 1 else x[rows]


def _check_labels(m_indices: torch.Tensor, E: int) -> None:
    """Refuses a block that mixes experts: a GPU kernel reads one label a block and would compute it wrongly."""
    blocks = m_indices.view(-1, BLOCK)
    first = blocks[:, :1]
    wrong = (m_indices >= E).view_as(blocks) | ((blocks >= 0) & (blocks != first))
    if wrong.any():
        block, offset = (int(i) for i in wrong.nonzero()[0])
        raise ValueError(
            f"grouped_gemm_contiguous: m_indices must be one expert below {E} in each block of {BLOCK} rows, -1 only "
            f"behind it; got {int(blocks[block, offset])} in row {block * BLOCK + offset} of a block that starts with "
            f"{int(first[block])}. Start each expert's rows on a multiple of {BLOCK}."
        )
