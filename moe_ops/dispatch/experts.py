"""Experts: one rank's experts on sorted rows, or on plain tokens."""

from dataclasses import dataclass

import torch
from torch import Tensor

from moe_ops import check
from moe_ops import forward as _ops  # noqa: F401  registers the ops
from moe_ops.dispatch.wire import Tokens
from moe_ops.meta.silu_and_quant import check_activation
from moe_ops.prep import MoEWeights


@dataclass(frozen=True)
class ExpertRows:
    """What the grouped GEMMs read. Exactly one of m_indices (contiguous) and masked_m (masked) is given."""

    x: Tensor
    """(M, K), or (E, m_max, K)."""
    x_scale: Tensor | None
    m_indices: Tensor | None = None
    masked_m: Tensor | None = None
    expected_m: int = 1
    src2dst: Tensor | None = None
    """(N, top_k) int32 rows of the received tokens' routes, where post_permute needs them."""


def pack_rows(tokens: Tokens) -> tuple[Tensor, Tensor | None]:
    """(x, x_scale): scales row-major (..., M, G) brought to the MN-major form that the GEMMs read."""
    if tokens.scale is None:
        return tokens.x, None
    scale_format = "fp32" if tokens.scale.dtype == torch.float32 else "ue8m0"
    mn = tokens.x.shape[-2]
    return tokens.x, torch.ops.moe.pack_scale(tokens.scale, mn, scale_format=scale_format)


def add_bias(down: Tensor, rows: ExpertRows, w2_bias: Tensor | None) -> Tensor:
    """GEMM2's rows with w2_bias (E, K), rounded once more: for rows that leave this rank one by one."""
    if w2_bias is None:
        return down
    each = w2_bias[:, None] if rows.m_indices is None else w2_bias[rows.m_indices.clamp(min=0)]
    return (down.float() + each.float()).to(down.dtype)


class Experts:
    """expert(x) = w2 @ act(w13 @ x + w13_bias) + w2_bias for the experts of one rank.

    Args:
        weights: this rank's prepared experts.
        activation, swiglu_limit, gemm1_alpha, gemm1_clamp_limit: the formula; see moe_ops.silu_and_quant_contiguous.
        backend: see moe_ops.fused_deepgemm.
    """

    def __init__(
        self,
        weights: MoEWeights,
        *,
        activation: str = "silu",
        swiglu_limit: float | None = None,
        gemm1_alpha: float | None = None,
        gemm1_clamp_limit: float | None = None,
        backend: str = "auto",
    ):
        check_activation("Experts", activation, swiglu_limit, gemm1_alpha, gemm1_clamp_limit)
        self.weights = weights
        for tensor in weights.tensors().values():
            if tensor is not None:  # to the compiler what a module's buffers are: of fixed size, at a fixed address
                torch._dynamo.mark_static(tensor)
                torch._dynamo.mark_static_address(tensor)
        self.backend = backend
        self.formula = dict(
            activation=activation,
            swiglu_limit=swiglu_limit,
            gemm1_alpha=gemm1_alpha,
            gemm1_clamp_limit=gemm1_clamp_limit,
        )

    def __call__(self, rows: ExpertRows) -> Tensor:
        """(M, K) or (E, m_max, K) bf16, without w2_bias, which the way back adds."""
        given, moe = self.weights, torch.ops.moe
        if given.weight_format != "natural":
            fix = "Only whole tokens meet repacked weights (standard, flashinfer); here, pass natural ones."
            rule = "natural for rows that are sorted already"
            raise ValueError(check.sentence("Experts", "weight_format", rule, given.weight_format, fix))
        shared = dict(recipe=given.recipe, backend=self.backend)
        activation = dict(scale_format=given.scale_format, bias=given.w13_bias, **self.formula, **shared)
        if rows.m_indices is not None:
            m = rows.m_indices
            gateup = moe.grouped_gemm_contiguous(rows.x, rows.x_scale, given.w13, given.w13_scale, m, **shared)
            act_q, act_scale = moe.silu_and_quant_contiguous(gateup, m, **activation)
            return moe.grouped_gemm_contiguous(act_q, act_scale, given.w2, given.w2_scale, m, **shared)
        m = check.given("Experts", "masked_m", rows.masked_m, "without m_indices")
        hinted = dict(expected_m=rows.expected_m, **shared)
        gateup = moe.grouped_gemm_masked(rows.x, rows.x_scale, given.w13, given.w13_scale, m, **hinted)
        act_q, act_scale = moe.silu_and_quant_masked(gateup, m, **activation)
        return moe.grouped_gemm_masked(act_q, act_scale, given.w2, given.w2_scale, m, **hinted)

    def on_tokens(
        self,
        hidden_states: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        *,
        expert_start: int = 0,
        num_experts: int = -1,
        routed_scaling_factor: float = 1.0,
        layout: str = "auto",
    ) -> Tensor:
        """(T, K): the weighted sum over this rank's experts, by moe::fused_deepgemm in one planned workspace."""
        return torch.ops.moe.fused_deepgemm(
            hidden_states,
            topk_weights,
            topk_ids,
            **self.weights.tensors(),
            **self.weights.attributes(),
            layout=layout,
            routed_scaling_factor=routed_scaling_factor,
            expert_start=expert_start,
            num_experts=num_experts,
            backend=self.backend,
            **self.formula,
        )
