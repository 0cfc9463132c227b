"""Reference of moe::post_permute: float32, routes in order, scaled once, rounded once."""

import torch


def post_permute(
    outputs, *, rows, src2dst, topk_weights, topk_ids, bias, expert_start, routed_scaling_factor, mode, dtype
) -> None:
    (out,) = outputs
    flat = rows.flatten(0, -2)
    total = torch.zeros(out.shape[0], out.shape[-1], dtype=torch.float32, device=out.device)
    for route in range(src2dst.shape[1]):
        here = (src2dst[:, route] >= 0).nonzero().flatten()
        value = flat[src2dst[here, route].long()].float()
        if bias is not None:
            value = value + bias.float()[topk_ids[here, route].long() - expert_start]
        if topk_weights is not None:
            value = value * topk_weights[here, route, None].float()
        if mode == "routewise":
            out[:, route] = 0
            out[here, route] = (value * routed_scaling_factor).to(out.dtype)
        else:
            total[here] += value
    if mode == "sum":
        out.copy_(total * routed_scaling_factor)
