"""The judge: one MoE layer as a double loop over tokens and routes in float64. Shares no code with the ops."""

import torch
from torch import Tensor


def moe(
    hidden_states: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    w13: Tensor,
    w2: Tensor,
    *,
    w13_bias: Tensor | None = None,
    w2_bias: Tensor | None = None,
    activation: str = "silu",
    swiglu_limit: float | None = None,
    gemm1_alpha: float | None = None,
    gemm1_clamp_limit: float | None = None,
    routed_scaling_factor: float = 1.0,
    expert_start: int = 0,
) -> Tensor:
    """(T, K) float64: what the layer computes when nothing but the weights is quantised.

    Args:
        hidden_states: (T, K). topk_weights, topk_ids: (T, top_k).
        w13, w2: (E, 2 I, K) and (E, K, I), dequantised.
    """
    T, K = hidden_states.shape
    E, I = w2.shape[0], w2.shape[2]
    out = torch.zeros(T, K, dtype=torch.float64)
    for t in range(T):
        x = hidden_states[t].double()
        for weight, expert_id in zip(topk_weights[t].tolist(), topk_ids[t].tolist(), strict=True):
            e = expert_id - expert_start
            if expert_id < 0 or not 0 <= e < E:
                continue
            h = w13[e].double() @ x
            if w13_bias is not None:
                h = h + w13_bias[e].double()
            g, u = h[:I], h[I:]
            if activation == "situ":
                assert gemm1_alpha is not None and gemm1_clamp_limit is not None
                a, b = gemm1_alpha, gemm1_clamp_limit
                act = a * torch.tanh(g / a) / (1 + torch.exp(-g)) * b * torch.tanh(u / b)
            else:
                limit = gemm1_clamp_limit if gemm1_alpha is not None else swiglu_limit
                if limit is not None:
                    g = torch.minimum(g, torch.tensor(limit).double())
                    u = torch.minimum(torch.maximum(u, torch.tensor(-limit).double()), torch.tensor(limit).double())
                if gemm1_alpha is not None:
                    act = g / (1 + torch.exp(-gemm1_alpha * g)) * (u + 1)
                else:
                    act = g / (1 + torch.exp(-g)) * u
            y = w2[e].double() @ act
            if w2_bias is not None:
                y = y + w2_bias[e].double()
            out[t] += routed_scaling_factor * weight * y
    return out
