"""MoELayer: router, experts and shared expert as one nn.Module."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_ops import capture, check
from moe_ops import forward as _ops  # noqa: F401  registers the ops
from moe_ops.arena import Workspace
from moe_ops.layer_state import LayerState
from moe_ops.prep import MoEWeights
from moe_ops.sizes import Layer

_PREPARED = ("w13", "w13_scale", "w2", "w2_scale")
_FLOATS = {
    argument.name
    for op in (torch.ops.moe.topk, torch.ops.moe.fused_deepgemm)
    for argument in op.default._schema.arguments
    if "float" in str(argument.type)
}


class MoELayer(LayerState):
    """out = shared_expert(x) + routed_scaling_factor * sum over the chosen experts of weight * expert(x).

    Every tensor is a buffer, so `.to(device)` and `state_dict()` work. Casting the module (`.half()`) casts the router
    linear alone: the rest has the dtype that the recipe, or the routing, needs. A state dict holds packed scales in
    their contiguous form, so torch.save and safetensors both keep them, and says what the weights were prepared for.

    Args:
        router_weight: (E, K) float. Logits are computed in its dtype (torch.autocast casts them like any linear's).
        weights: prepared experts (moe_ops.prepare_weights, load_moe_weights). Where they are padded, K here and in
            forward is the model's own: rows are padded on the way in, the result is cut.
        top_k: routed experts a token.
        router_bias: (E,) float, added to the logits (gpt-oss).
        scoring, bias, renormalize, num_groups, topk_group, group_score, softcap: routing; see moe_ops.topk.
        hash_table: (vocabulary, top_k) expert ids; forward then needs token_ids.
        routed_scaling_factor: multiplies the routed sum, once.
        activation, swiglu_limit, gemm1_alpha, gemm1_clamp_limit: see moe_ops.silu_and_quant_contiguous.
        shared_expert: a module (T, K) -> (T, K) that every token goes through, or None.
        layout, backend, max_workspace_bytes: see moe_ops.fused_deepgemm.
        workspace: scratch memory that layers share (moe_ops.Workspace). None: each call allocates its own.

    Raises:
        ValueError, TypeError: arguments that no forward could run with.
    """

    router_weight: Tensor
    router_bias: Tensor | None
    bias: Tensor | None
    hash_table: Tensor | None
    w13: Tensor
    w13_scale: Tensor | None
    w2: Tensor
    w2_scale: Tensor | None
    w13_bias: Tensor | None
    w2_bias: Tensor | None

    def __init__(
        self,
        router_weight: Tensor,
        weights: MoEWeights,
        *,
        top_k: int,
        router_bias: Tensor | None = None,
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
        max_workspace_bytes: int | None = None,
        workspace: Workspace | None = None,
    ):
        super().__init__()
        self.padding = weights.padding
        self.prepared_for = f"{weights.recipe} {weights.scale_format}"
        if weights.weight_format != "natural":
            self.prepared_for += f" {weights.weight_format}"
        self.K = weights.K - weights.padding.K
        check.shape("MoELayer", "router_weight", router_weight, (weights.E, self.K), "(E, K)", "One row per expert.")
        if router_bias is not None:
            check.shape("MoELayer", "router_bias", router_bias, (weights.E,), "(E,)", "One value per expert.")
        router = dict(router_weight=router_weight, router_bias=router_bias, bias=bias, hash_table=hash_table)
        tensors = {**router, **weights.tensors()}
        for name, tensor in tensors.items():
            if tensor is None:  # not a buffer: torch.export counts buffers that are None, and miscounts
                setattr(self, name, None)
            else:
                self.register_buffer(name, tensor.detach())
        self.fp8 = [name for name in tensors if "_fp8" in name]
        self.I = weights.I - weights.padding.I
        self.shared_expert = shared_expert
        self.workspace = workspace
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
            **weights.attributes(),
            layout=layout,
            activation=activation,
            swiglu_limit=swiglu_limit,
            gemm1_alpha=gemm1_alpha,
            gemm1_clamp_limit=gemm1_clamp_limit,
            routed_scaling_factor=routed_scaling_factor,
            backend=backend,
            max_workspace_bytes=max_workspace_bytes,
        )
        self.sizes = Layer(
            0,
            top_k,
            weights.E,
            weights.K,
            weights.I,
            weights.recipe,
            weights.scale_format,
            layout,
            weight_format=weights.weight_format,
            has_fp8=bool(self.fp8),
        )
        self._rehearse()
        capture.prepare(self.w2.device)

    def forward(
        self,
        hidden_states: Tensor,
        token_ids: Tensor | None = None,
        *,
        workspace: Tensor | None = None,
        num_token_non_padded: Tensor | None = None,
    ) -> Tensor:
        """(..., K) -> (..., K). token_ids (...) ints for hash routing. workspace as in moe_ops.fused_deepgemm; it takes
        the place of the layer's own. num_token_non_padded: one int on the device; tokens from there on are padding,
        which no expert computes."""
        self._check_call(hidden_states, token_ids)
        x = hidden_states.flatten(0, -2)
        if workspace is None and self.workspace is not None:
            workspace = self.workspace.arena
        out = self._routed(x, None if token_ids is None else token_ids.flatten(), workspace, num_token_non_padded)
        if self.shared_expert is not None:
            out = out + self.shared_expert(x)
        return out.view_as(hidden_states)

    def _routed(
        self, x: Tensor, token_ids: Tensor | None, workspace: Tensor | None, num_token_non_padded: Tensor | None
    ) -> Tensor:
        logits = F.linear(x.to(self.router_weight.dtype), self.router_weight, self.router_bias)
        hashing = {} if token_ids is None else dict(hash_table=self.hash_table, token_ids=token_ids)
        routing = arguments_of(self.routing)
        if num_token_non_padded is not None:
            routing["num_token_non_padded"] = num_token_non_padded
        topk_weights, topk_ids = torch.ops.moe.topk(logits, bias=self.bias, **hashing, **routing)
        out = torch.ops.moe.fused_deepgemm(
            F.pad(x, (0, self.padding.K)) if self.padding.K else x,
            topk_weights,
            topk_ids,
            **self.expert_tensors(),
            workspace=workspace,
            **arguments_of(self.experts),
        )
        return out[:, : self.K] if self.padding.K else out

    def expert_tensors(self) -> dict[str, Tensor | None]:
        """The experts' weights, scales and biases by the names of fused_deepgemm."""
        return {name: getattr(self, name) for name in (*_PREPARED, "w13_bias", "w2_bias", *self.fp8)}

    def _check_call(self, hidden_states: Tensor, token_ids: Tensor | None) -> None:
        op = "MoELayer.forward"
        if not isinstance(hidden_states, Tensor):
            fix = "Convert it."
            raise TypeError(check.sentence(op, "hidden_states", "a tensor", type(hidden_states).__name__, fix))
        if hidden_states.dim() < 2 or hidden_states.shape[-1] != self.K:
            rule, got = f"of shape (..., K) with K={self.K}", tuple(hidden_states.shape)
            raise ValueError(check.sentence(op, "hidden_states", rule, got, "Unsqueeze a single token."))
        if (token_ids is None) != (self.hash_table is None):
            rule = "given to a layer that routes by hash, and to no other"
            got = "None" if token_ids is None else "a tensor"
            raise ValueError(check.sentence(op, "token_ids", rule, got, "Check which layers have a hash table."))

    def _rehearse(self) -> None:
        """A call on meta tensors: what no forward could run with is refused now, and not in the first request."""

        def meta(*shape, dtype=torch.bfloat16):
            return torch.empty(*shape, dtype=dtype, device="meta")

        bias = None if self.bias is None else self.bias.to("meta")
        hashing = {}
        if self.hash_table is not None:
            hashing = dict(hash_table=self.hash_table.to("meta"), token_ids=meta(2, dtype=torch.int64))
        with torch.no_grad():
            routing, experts = arguments_of(self.routing), arguments_of(self.experts)
            routes = torch.ops.moe.topk(meta(2, len(self.router_weight)), bias=bias, **hashing, **routing)
            tensors = {name: None if t is None else t.to("meta") for name, t in self.expert_tensors().items()}
            torch.ops.moe.fused_deepgemm(meta(2, self.K + self.padding.K), *routes, **tensors, **experts)

    def extra_repr(self) -> str:
        return f"E={len(self.w13)}, K={self.K}, I={self.I}, {self.routing}, {self.experts}"


def _beside_defaults(op, **attributes) -> dict:
    """The attributes that differ from the op's defaults: Dynamo guards each one that is passed.

    Floats as text: under dynamic=True Dynamo takes a module's float for a variable and compiles everything twice, but
    it folds float("2.5").
    """
    defaults = {argument.name: argument.default_value for argument in op.default._schema.arguments}
    chosen = {name: value for name, value in attributes.items() if value != defaults[name]}
    return {name: repr(value) if name in _FLOATS else value for name, value in chosen.items()}


def arguments_of(attributes: dict) -> dict:
    """Attributes of a layer (`routing`, `experts`) as the ops take them."""
    return {name: float(value) if name in _FLOATS else value for name, value in attributes.items()}
