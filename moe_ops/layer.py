"""MoELayer: router, experts and shared expert as one nn.Module."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe_ops import check
from moe_ops import forward as _ops  # noqa: F401  registers the ops
from moe_ops.prep import MoEWeights


class MoELayer(nn.Module):
    """out = shared_expert(x) + routed_scaling_factor * sum over the chosen experts of weight * expert(x).

    Every tensor is a buffer, so `.to(device)` and `state_dict()` work; casting the module (`.half()`) casts the router
    and the biases, and leaves prepared weights and scales as they are.

    Args:
        router_weight: (E, K) float. Logits are computed in its dtype.
        weights: prepared experts (moe_ops.prepare_weights).
        top_k: routed experts a token.
        scoring, bias, renormalize, num_groups, topk_group, group_score, softcap: routing; see moe_ops.topk.
        hash_table: (vocabulary, top_k) expert ids; forward then needs token_ids.
        routed_scaling_factor: multiplies the routed sum, once.
        activation, swiglu_limit, gemm1_alpha, gemm1_clamp_limit: see moe_ops.silu_and_quant_contiguous.
        shared_expert: a module (..., K) -> (..., K) that every token goes through, or None.
        layout, backend: see moe_ops.fused_deepgemm.
    """

    router_weight: Tensor
    bias: Tensor | None
    hash_table: Tensor | None
    w13: Tensor
    w13_scale: Tensor | None
    w2: Tensor
    w2_scale: Tensor | None
    w13_bias: Tensor | None
    w2_bias: Tensor | None

    _KEEP_DTYPE = ("w13", "w13_scale", "w2", "w2_scale")

    def __init__(
        self,
        router_weight: Tensor,
        weights: MoEWeights,
        *,
        top_k: int,
        scoring: str = "softmax",
        bias: Tensor | None = None,
        renormalize: bool = True,
        num_groups: int = 1,
        topk_group: int = 1,
        group_score: str = "top2",
        softcap: float | None = None,
        hash_table: Tensor | None = None,
        routed_scaling_factor: float = 1.0,
        activation: str = "silu",
        swiglu_limit: float | None = None,
        gemm1_alpha: float | None = None,
        gemm1_clamp_limit: float | None = None,
        shared_expert: Callable[[Tensor], Tensor] | None = None,
        layout: str = "auto",
        backend: str = "auto",
    ):
        super().__init__()
        shape = (weights.E, weights.K)
        check.shape("MoELayer", "router_weight", router_weight, shape, "(E, K)", "One row per expert of weights.")
        tensors = {"router_weight": router_weight, "bias": bias, "hash_table": hash_table, **weights.tensors()}
        for name, tensor in tensors.items():
            self.register_buffer(name, None if tensor is None else tensor.detach())
        self.shared_expert = shared_expert
        self.routing = _beside_defaults(
            torch.ops.moe.topk,
            top_k=top_k,
            scoring=scoring,
            softcap=softcap,
            renormalize=renormalize,
            num_groups=num_groups,
            topk_group=topk_group,
            group_score=group_score,
            backend=backend,
        )
        self.experts = _beside_defaults(
            torch.ops.moe.fused_deepgemm,
            recipe=weights.recipe,
            layout=layout,
            activation=activation,
            swiglu_limit=swiglu_limit,
            gemm1_alpha=gemm1_alpha,
            gemm1_clamp_limit=gemm1_clamp_limit,
            routed_scaling_factor=routed_scaling_factor,
            backend=backend,
        )

    def forward(
        self, hidden_states: Tensor, token_ids: Tensor | None = None, *, workspace: Tensor | None = None
    ) -> Tensor:
        """(..., K) -> (..., K). token_ids (...) ints for hash routing. workspace as in moe_ops.fused_deepgemm."""
        x = hidden_states.flatten(0, -2)
        logits = F.linear(x.to(self.router_weight.dtype), self.router_weight)
        hashing = {}
        if self.hash_table is not None:
            token_ids = check.given("MoELayer.forward", "token_ids", token_ids, "to a layer that routes by hash")
            hashing = dict(hash_table=self.hash_table, token_ids=token_ids.flatten())
        topk_weights, topk_ids = torch.ops.moe.topk(logits, bias=self.bias, **hashing, **self.routing)
        out = torch.ops.moe.fused_deepgemm(
            x,
            topk_weights,
            topk_ids,
            self.w13,
            self.w13_scale,
            self.w2,
            self.w2_scale,
            w13_bias=self.w13_bias,
            w2_bias=self.w2_bias,
            workspace=workspace,
            **self.experts,
        )
        if self.shared_expert is not None:
            out = out + self.shared_expert(x)
        return out.view_as(hidden_states)

    def extra_repr(self) -> str:
        E, N, _ = self.w13.shape
        return f"E={E}, K={self.w2.shape[1]}, I={N // 2}, {self.routing}, {self.experts}"

    def _apply(self, fn, recurse=True):
        """Moves everything; keeps the dtype of what the recipe fixes, because fp8 values are floats to `.half()`."""
        before = {name: getattr(self, name) for name in self._KEEP_DTYPE}
        super()._apply(fn, recurse)
        for name, tensor in before.items():
            moved = getattr(self, name)
            if tensor is not None and moved.dtype != tensor.dtype:
                setattr(self, name, tensor.to(moved.device))
        return self


def _beside_defaults(op, **attributes) -> dict:
    """The attributes that differ from the op's defaults. Dynamo guards each one that is passed, and compiles twice for
    a float under dynamic=True (it first tries the float as a variable)."""
    defaults = {argument.name: argument.default_value for argument in op.default._schema.arguments}
    return {name: value for name, value in attributes.items() if value != defaults[name]}
