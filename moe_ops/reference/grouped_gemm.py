"""Reference of moe::grouped_gemm_{contiguous,masked,gathered,direct}: dequantise, multiply in float32, round once.

Each expert's valid rows go through one matrix product in slot order, whatever the layout: all give the same bits.
"""

import torch

from moe_ops.recipes import Recipe, get_recipe
from moe_ops.reference.bounds import check_counts
from moe_ops.reference.quantize import dequantize_rows, dequantize_weight, quantize_groups, stored
from moe_ops.reference.repacked import natural_weight
from moe_ops.rows import BLOCK
from moe_ops.weight_format import FORMATS


def grouped_gemm_contiguous(outputs, *, x, x_scale, w, w_scale, m_indices, ends, recipe) -> None:
    (out,) = outputs
    row = get_recipe("grouped_gemm_contiguous", recipe)
    _check_labels(m_indices, len(w))
    for expert in m_indices[m_indices >= 0].unique().tolist():
        rows = (m_indices == expert).nonzero().flatten()
        scale = x_scale[rows] if row.quantised else None
        out[rows] = product(take(x, rows), scale, w, w_scale, expert, row)


def grouped_gemm_masked(outputs, *, x, x_scale, w, w_scale, masked_m, expected_m, recipe) -> None:
    (out,) = outputs
    row = get_recipe("grouped_gemm_masked", recipe)
    check_counts("grouped_gemm_masked", masked_m, x.shape[1])
    for expert, valid in enumerate(masked_m.tolist()):
        if valid:
            scale = x_scale[expert, :valid] if row.quantised else None
            out[expert, :valid] = product(x[expert, :valid], scale, w, w_scale, expert, row)


def grouped_gemm_gathered(outputs, *, x, x_scale, tiles, w, w_scale, block_m, recipe, weight_format) -> None:
    (out,) = outputs
    row = get_recipe("grouped_gemm_gathered", recipe)
    for expert, first, end in expert_spans(tiles):
        scale = x_scale[first:end] if row.quantised else None
        out[first:end] = product(x[first:end], scale, w, w_scale, expert, row, weight_format)


def grouped_gemm_direct(outputs, *, x, topk_ids, w, w_scale, recipe, scale_format, expert_start) -> None:
    (out,) = outputs
    row = get_recipe("grouped_gemm_direct", recipe)
    for expert in range(len(w)):
        rows = (topk_ids.flatten() == expert + expert_start).nonzero().flatten()
        if len(rows):
            values, scale = as_rows(x[rows], row, scale_format)
            out[rows] = product(values, scale, w, w_scale, expert, row)


def expert_spans(tiles: torch.Tensor) -> list[tuple[int, int, int]]:
    """(expert, first row, row behind the last) of each expert that has tiles."""
    spans: dict[int, tuple[int, int]] = {}
    for expert, first, rows in tiles.T.tolist():
        if expert >= 0:
            start, end = spans.get(expert, (first, first))
            spans[expert] = (min(start, first), max(end, first + rows))
    return [(expert, *span) for expert, span in spans.items()]


def as_rows(x: torch.Tensor, recipe: Recipe, scale_format: str) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(values, scales as stored or None) of float rows in the recipe's form."""
    if not recipe.quantised:
        return x.to(recipe.x_dtype), None
    values, scale = quantize_groups(x, recipe.x_group, scale_format)
    return values, stored(scale, scale_format)


def product(x, x_scale, w, w_scale, expert: int, recipe: Recipe, weight_format: str = "natural") -> torch.Tensor:
    one, scale = w[expert], w_scale[expert] if recipe.quantised else None
    if FORMATS[weight_format].repacked:
        assert scale is not None
        one, scale = natural_weight(one, scale, FORMATS[weight_format].factor)
    weight = dequantize_weight(one, scale, recipe)
    return (dequantize_rows(x, x_scale, recipe) @ weight.T).to(torch.bfloat16)


def take(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
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
