"""Reference of moe::pre_permute_{contiguous,masked,gathered}: count, align, scatter, quantise."""

import torch

from moe_ops.recipes import get_recipe
from moe_ops.reference.quantize import quantize_groups, stored
from moe_ops.rows import BLOCK, align


def pre_permute_contiguous(outputs, *, topk_ids, num_local_experts, expert_start, **tokens) -> None:
    x_out, scale_out, m_indices, src2dst, ends, _ = outputs
    expert, owner, counts, slot = _slots(topk_ids, num_local_experts, expert_start)
    start = align(counts, BLOCK).cumsum(0) - align(counts, BLOCK)
    row = start[expert.clamp(min=0)] + slot
    ends.copy_(start + counts)
    m_indices.fill_(-1)
    m_indices[row[owner]] = expert[owner].int()
    _scatter(x_out, scale_out, src2dst, row, owner, expert, topk_ids, **tokens)


def pre_permute_masked(outputs, *, topk_ids, num_local_experts, expert_start, **tokens) -> None:
    x_out, scale_out, masked_m, src2dst, _ = outputs
    m_max = x_out.shape[1]
    expert, owner, counts, slot = _slots(topk_ids, num_local_experts, expert_start)
    masked_m.copy_(counts)
    row = expert.clamp(min=0) * m_max + slot
    _scatter(x_out, scale_out, src2dst, row, owner, expert, topk_ids, **tokens)


def pre_permute_gathered(
    outputs, *, hidden_states, topk_ids, num_local_experts, block_m, expert_start, recipe, scale_format
) -> None:
    x_out, scale_out, row_token, tiles, src2dst, _ = outputs
    row = get_recipe("pre_permute_gathered", recipe)
    if row.quantised:
        values, scale = quantize_groups(hidden_states, row.x_group, scale_format)
        x_out.copy_(values)
        scale_out.copy_(stored(scale, scale_format))
    else:
        x_out.copy_(hidden_states)
    local = topk_ids.long() - expert_start
    local = torch.where((topk_ids >= 0) & (local >= 0) & (local < num_local_experts), local, num_local_experts)
    expert = local.flatten()
    counts = torch.bincount(expert, minlength=num_local_experts + 1)[:num_local_experts]
    order = expert.argsort(stable=True)[: int(counts.sum())]
    row_token[: len(order)] = (order // topk_ids.shape[1]).int()
    src2dst.fill_(-1)
    src2dst.flatten()[order] = torch.arange(len(order), dtype=torch.int32, device=order.device)
    tiles[0] = -1
    place, start = 0, 0
    for label, count in enumerate(counts.tolist()):
        for first in range(0, count, block_m):
            tiles[:, place] = torch.tensor([label, start + first, min(count - first, block_m)])
            place += 1
        start += count


def _slots(topk_ids: torch.Tensor, E: int, expert_start: int):
    """Of each route, flat: its local expert or -1; whether it owns a row; rows per expert; its slot there.

    Slots follow the order of routes, so the result is the same on every run. A token that names an expert twice gets
    one row there, owned by its first route: the GEMM result would be the same twice, and T rows are enough for any
    expert.
    """
    local = topk_ids.long() - expert_start
    local = torch.where((topk_ids >= 0) & (local >= 0) & (local < E), local, -1)
    top_k = topk_ids.shape[1]
    earlier = torch.ones(top_k, top_k, dtype=torch.bool, device=topk_ids.device).tril(-1)
    repeated = ((local[:, :, None] == local[:, None, :]) & earlier).any(2)
    expert = local.flatten()
    owner = (expert >= 0) & ~repeated.flatten()
    counts = torch.bincount(expert[owner], minlength=E)
    order = torch.where(owner, expert, E).argsort(stable=True)[: int(counts.sum())]
    slot = torch.zeros_like(expert)
    slot[order] = torch.arange(len(order), device=order.device) - (counts.cumsum(0) - counts)[expert[order]]
    return expert, owner, counts, slot


def _scatter(x_out, scale_out, src2dst, row, owner, expert, topk_ids, *, hidden_states, recipe, scale_format) -> None:
    recipe = get_recipe("pre_permute", recipe)
    token = torch.arange(topk_ids.numel(), device=row.device)[owner] // topk_ids.shape[1]
    rows = row[owner]
    if recipe.quantised:
        values, scale = quantize_groups(hidden_states, recipe.x_group, scale_format)
        place = (rows,) if scale_out.dim() == 2 else (rows // scale_out.shape[1], rows % scale_out.shape[1])
        scale_out[place] = stored(scale, scale_format)[token]
        x_out.flatten(0, -2).view(torch.uint8)[rows] = values.view(torch.uint8)[token]
    else:
        x_out.flatten(0, -2)[rows] = hidden_states.to(recipe.x_dtype)[token]
    owned = torch.where(owner, row, 0).view(topk_ids.shape)
    same = topk_ids[:, :, None] == topk_ids[:, None, :]
    first = same.int().argmax(2)  # the route of this token that owns the row
    src2dst.copy_(torch.where(expert.view(topk_ids.shape) >= 0, owned.gather(1, first), -1))
