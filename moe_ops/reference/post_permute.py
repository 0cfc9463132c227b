"""Reference of moe::post_permute: float32, routes in order, scaled once, rounded once."""

import torch

from moe_ops.reference.bounds import check_below


def post_permute(
    outputs, *, rows, src2dst, topk_weights, topk_ids, bias, expert_start, routed_scaling_factor, mode, dtype
) -> None:
    (out,) = outputs
    flat = rows.flatten(0, -2)
    check_below("post_permute", "src2dst", src2dst, len(flat), "rows")
    total = torch.zeros(out.shape[0], out.shape[-1], dtype=torch.float32, device=out.device)
    for route in range(src2dst.shape[1]):
        here = (src2dst[:, route] >= 0).nonzero().flatten()
        value = flat[src2dst[here, route].long()].float()
        if bias is not None:
            value = value + bias.float()[_local(topk_ids[here, route], expert_start, len(bias))]
        if topk_weights is not None:
            value = value * topk_weights[here, route, None].float()
        if mode == "routewise":
            out[:, route] = 0
            out[here, route] = (value * routed_scaling_factor).to(out.dtype)
        else:
            total[here] += value
    if mode == "sum":
        out.copy_(total * routed_scaling_factor)


def _local(ids: torch.Tensor, expert_start: int, E: int) -> torch.Tensor:
    """Local experts of routes that have a row. An id of another rank would wrap to the wrong bias."""
    local = ids.long() - expert_start
    wrong = (local < 0) | (local >= E)
    if wrong.any():
        raise ValueError(
            f"post_permute: topk_ids of routes with a row must be in [{expert_start}, {expert_start + E}), the experts "
            f"of bias; got {int(ids[wrong][0])}. Pass the topk_ids and expert_start that pre_permute was given."
        )
    return local
