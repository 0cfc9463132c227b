"""moe::fused_deepgemm: the expert layer, one line a stage.

To Dynamo and torch.export it is one node; AOTAutograd and Inductor see the stages. Between them they touch one flat
workspace and nothing else, so eager and compiled alike make two allocations (workspace and result) and no copy.
"""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from moe_ops import check
from moe_ops import ops as _stages  # noqa: F401  registers moe::*_ws
from moe_ops.choice import choose
from moe_ops.chunks import FORMULA, TAIL, TENSORS
from moe_ops.meta import fused_deepgemm as contract
from moe_ops.ops.silu_and_quant import FORMULA_SCHEMA
from moe_ops.planner import plan_layer, workspace_bytes
from moe_ops.registry import define_composite
from moe_ops.sizes import Layer
from moe_ops.workspace import sizes_of


def _forward(*, workspace, routed_scaling_factor, max_workspace_bytes, **arguments) -> Tensor:
    layer = Layer(**contract.fused_deepgemm(**arguments))
    given = SimpleNamespace(**arguments)
    if max_workspace_bytes is not None and not _fits(layer, max_workspace_bytes, workspace, given):
        ws = _bounded(workspace, given, layer, max_workspace_bytes)
        rest = dict(routed_scaling_factor=routed_scaling_factor, max_workspace_bytes=max_workspace_bytes)
        given = {name: arguments[name] for name in (*TENSORS, *FORMULA)}
        sizes = dict(zip(TAIL, sizes_of(layer, arguments["backend"]), strict=True))
        return torch.ops.moe.fused_deepgemm_ws(ws, **given, **rest, **sizes)
    ws = _workspace(workspace, given.hidden_states, layer, given.backend)
    formula = (given.activation, given.swiglu_limit, given.gemm1_alpha, given.gemm1_clamp_limit)
    dtype = str(given.hidden_states.dtype).removeprefix("torch.")
    tail = sizes_of(layer, given.backend)
    x, ids, start = given.hidden_states, given.topk_ids, given.expert_start
    w13 = (given.w13, given.w13_scale, given.w13_fp8, given.w13_fp8_scale)
    w2 = (given.w2, given.w2_scale, given.w2_fp8, given.w2_fp8_scale)
    moe = torch.ops.moe
    moe.pre_permute_ws(ws, x, ids, start, *tail)
    moe.gated_gemm_ws(ws, x, ids, *w13, given.w13_bias, *formula, start, *tail)
    moe.silu_and_quant_ws(ws, given.w13_bias, *formula, *tail)  # nothing left where GEMM1 ends with the activation
    moe.grouped_gemm_ws(ws, ids, *w2, start, *tail)
    weights = (given.topk_weights, ids, given.w2_bias, start, routed_scaling_factor, dtype)
    return moe.post_permute_ws(ws, *weights, *tail)


def _workspace(workspace: Tensor | None, hidden_states: Tensor, layer: Layer, backend: str) -> Tensor:
    """The caller's arena if there is one, else a fresh one. Stages check it again, its address included.

    Traced, the layout is decided when the graph runs. A fresh arena then has room for any; a caller's is left to the
    stages: compared with a formula of T here, its length would be a guard, and such guards, when torch takes the graph
    from its cache, hold for few T.
    """
    needed: Any = 0
    if isinstance(layer.T, int):
        choice = choose("fused_deepgemm", layer, backend, hidden_states.device)
        needed = plan_layer(layer, choice).total_bytes
    elif workspace is None:
        needed = workspace_bytes(layer, backend, _graph_device(hidden_states))
    if workspace is None:
        return hidden_states.new_empty((needed,), dtype=torch.uint8)
    check.workspace("fused_deepgemm", workspace, needed, traced=True)
    check.same_device("fused_deepgemm", hidden_states.device, workspace=workspace)
    return workspace


def _graph_device(hidden_states: Tensor) -> torch.device | None:
    """The card for which a graph is traced. A graph of the CPU may be moved to any device."""
    return hidden_states.device if hidden_states.is_cuda else None


def _fits(layer: Layer, budget: int, workspace: Tensor | None, given: SimpleNamespace) -> bool:
    """Whether the whole call is known to fit the budget and the caller's arena. A traced token count is not known."""
    if not isinstance(layer.T, int):
        return False
    choice = choose("fused_deepgemm", layer, given.backend, given.hidden_states.device)
    needed = plan_layer(layer, choice).total_bytes
    return needed <= budget and (workspace is None or needed <= workspace.numel())


def _bounded(workspace: Tensor | None, given: SimpleNamespace, layer: Layer, budget: int) -> Tensor:
    """The caller's arena, or a fresh one of no more than the budget."""
    fix = "Pass what moe_ops.plan(...) shows."
    check.value(budget > 0, "fused_deepgemm", "max_workspace_bytes", "positive", budget, fix)
    hidden_states = given.hidden_states
    if workspace is None:
        nbytes: Any = workspace_bytes(layer, given.backend, _graph_device(hidden_states))
        return hidden_states.new_empty((torch.sym_min(nbytes, budget),), dtype=torch.uint8)
    check.workspace("fused_deepgemm", workspace, 0, traced=True)
    check.same_device("fused_deepgemm", hidden_states.device, workspace=workspace)
    return workspace


define_composite(
    "fused_deepgemm",
    "(Tensor hidden_states, Tensor topk_weights, Tensor topk_ids, Tensor w13, Tensor? w13_scale, Tensor w2, "
    'Tensor? w2_scale, *, str recipe, str layout="auto", Tensor? w13_bias=None, Tensor? w2_bias=None, '
    f"{FORMULA_SCHEMA}, "
    "float routed_scaling_factor=1.0, int expert_start=0, int num_experts=-1, "
    'str weight_format="natural", Tensor? w13_fp8=None, Tensor? w13_fp8_scale=None, Tensor? w2_fp8=None, '
    "Tensor? w2_fp8_scale=None, "
    'str backend="auto", Tensor(a!)? workspace=None, int? max_workspace_bytes=None) -> Tensor',
    _forward,
)


def fused_deepgemm(
    hidden_states: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    w13: Tensor,
    w13_scale: Tensor | None,
    w2: Tensor,
    w2_scale: Tensor | None,
    *,
    recipe: str,
    layout: str = "auto",
    w13_bias: Tensor | None = None,
    w2_bias: Tensor | None = None,
    activation: str = "silu",
    swiglu_limit: float | None = None,
    gemm1_alpha: float | None = None,
    gemm1_clamp_limit: float | None = None,
    routed_scaling_factor: float = 1.0,
    expert_start: int = 0,
    num_experts: int = -1,
    weight_format: str = "natural",
    w13_fp8: Tensor | None = None,
    w13_fp8_scale: Tensor | None = None,
    w2_fp8: Tensor | None = None,
    w2_fp8_scale: Tensor | None = None,
    backend: str = "auto",
    workspace: Tensor | None = None,
    max_workspace_bytes: int | None = None,
) -> Tensor:
    """The routed experts of one MoE layer: out[t] = rsf * sum_j weight[t, j] * expert_{id[t, j]}(hidden_states[t]).

    expert(x) = w2 @ act(w13 @ x + w13_bias) + w2_bias, with x and act quantised as the recipe says. No host sync on a
    GPU kernel's path, no data-dependent shape, inputs are never written or freed, and the same inputs give the same
    bits on every run.

    Args:
        hidden_states: (T, K) bf16, fp16 or fp32.
        topk_weights, topk_ids: (T, top_k) float and int32 / int64, from moe::topk or the model's own router.
            Ids outside this rank's range, -1 among them, contribute nothing.
        w13, w13_scale: (E, 2 I, K) prepared weights, gate rows over up rows, and their scales (prepare_weights).
        w2, w2_scale: (E, K, I) prepared weights and their scales.
        recipe: bf16, fp8_block, mxfp8 or mxfp4.
        layout: contiguous, masked, gathered, direct, or auto (the table in choice.py). On the CPU they give the same
            bits.
        w13_bias, w2_bias: (E, 2 I) and (E, K) float.
        activation, swiglu_limit, gemm1_alpha, gemm1_clamp_limit: the formula; see silu_and_quant_contiguous.
        routed_scaling_factor: multiplies the sum, once, here. Do not also scale topk_weights.
        expert_start, num_experts: this rank holds experts [expert_start, expert_start + E) of num_experts. -1: E; only
            a tuning hint depends on it.
        weight_format: how w13 and w2 are stored: natural, or repacked for one card (moe_ops.repack_weights).
        w13_fp8, w13_fp8_scale, w2_fp8, w2_fp8_scale: all or none: repacked weights once more as fp8 blocks, from which
            calls with many rows an expert are computed (choice.REPACKED_ROWS).
        backend: auto, or one by name, which raises where it cannot run.
        workspace: flat uint8 scratch memory to use instead of a fresh one, at least plan(...).workspace_bytes long for
            the largest T (an eager call of one T needs plan(...).total_bytes). Its contents mean nothing, before and
            after. One call at a time may use it: threads and streams that overlap need one each.
        max_workspace_bytes: the call runs in so much workspace, and in no more than `workspace` has, whatever its
            tokens: it is split into parts of whole tokens, computed one after another as the whole would be (layout,
            backend and tiles are the whole's; docs/decode.md says what is equal bit for bit).
            plan(..., max_workspace_bytes=...).chunks shows them.

    Returns:
        (T, K) in the dtype of hidden_states, in memory of its own.

    Raises:
        ValueError, TypeError: an argument does not fit; the sentence names it. RuntimeError: gradients are wanted.
    """
    return torch.ops.moe.fused_deepgemm(
        hidden_states,
        topk_weights,
        topk_ids,
        w13,
        w13_scale,
        w2,
        w2_scale,
        recipe=recipe,
        layout=layout,
        w13_bias=w13_bias,
        w2_bias=w2_bias,
        activation=activation,
        swiglu_limit=swiglu_limit,
        gemm1_alpha=gemm1_alpha,
        gemm1_clamp_limit=gemm1_clamp_limit,
        routed_scaling_factor=routed_scaling_factor,
        expert_start=expert_start,
        num_experts=num_experts,
        weight_format=weight_format,
        w13_fp8=w13_fp8,
        w13_fp8_scale=w13_fp8_scale,
        w2_fp8=w2_fp8,
        w2_fp8_scale=w2_fp8_scale,
        backend=backend,
        workspace=workspace,
        max_workspace_bytes=max_workspace_bytes,
    )
