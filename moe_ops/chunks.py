"""moe::fused_deepgemm_ws: the expert layer on a workspace that need not hold all of its tokens at once.

One op to every tracer, because how many parts there are depends on the token count of the call.
"""

from dataclasses import replace

import torch
from torch import Tensor

from moe_ops import backends, check
from moe_ops.choice import choose
from moe_ops.ops.post_permute import POST_PERMUTE
from moe_ops.planner import split
from moe_ops.registry import STAGES, define_ws
from moe_ops.sizes import Layer
from moe_ops.spec import TensorSpec
from moe_ops.workspace import LAYER_SCHEMA, Stage, sizes_of

TENSORS = (
    "hidden_states",
    "topk_weights",
    "topk_ids",
    "w13",
    "w13_scale",
    "w2",
    "w2_scale",
    "w13_fp8",
    "w13_fp8_scale",
    "w2_fp8",
    "w2_fp8_scale",
    "w13_bias",
    "w2_bias",
)
FORMULA = ("activation", "swiglu_limit", "gemm1_alpha", "gemm1_clamp_limit", "expert_start")
TAIL = tuple(argument.split()[1] for argument in LAYER_SCHEMA.split(", "))
"""Names of the sizes that end the schema."""


def _run(*, ws, topk_ids, hidden_states, routed_scaling_factor, max_workspace_bytes, backend, **given) -> Tensor:
    layer = Layer(**{name: given[name] for name in TAIL if name != "backend"})
    check.workspace("fused_deepgemm", ws, 0)
    check.apart("fused_deepgemm", ws, *(given.get(name) for name in TENSORS), hidden_states, topk_ids)
    choice = choose("fused_deepgemm", layer, backend, ws.device)
    backend = _gemm_backend(layer, backend if layer.layout == "auto" else choice.backend, ws.device)
    out = torch.empty_like(hidden_states, memory_format=torch.contiguous_format)
    first = 0
    for tokens in split(layer, choice, min(ws.numel(), max_workspace_bytes)):
        rows = slice(first, first + tokens)
        x, ids, weights = hidden_states[rows], topk_ids[rows], given["topk_weights"][rows]
        sizes = dict(zip(TAIL, sizes_of(replace(layer, T=tokens), backend), strict=True)) | dict(of=layer.T)
        _part(out[rows], ws, x, ids, weights, routed_scaling_factor, given, sizes)
        first += tokens
    return out


def _part(out: Tensor, ws, x, ids, weights, routed_scaling_factor: float, given: dict, sizes: dict) -> None:
    """One part, its result written to `out`."""
    start = given["expert_start"]
    formula = {name: given[name] for name in FORMULA if name != "expert_start"}
    weight = {w: {f"w{end}": given[f"{w}{end}"] for end in ("", "_scale", "_fp8", "_fp8_scale")} for w in ("w13", "w2")}
    tokens = dict(ws=ws, topk_ids=ids, expert_start=start, **sizes)
    STAGES["pre_permute_ws"](hidden_states=x, **tokens)
    STAGES["gated_gemm_ws"](hidden_states=x, bias=given["w13_bias"], **weight["w13"], **formula, **tokens)
    STAGES["silu_and_quant_ws"](ws=ws, bias=given["w13_bias"], **formula, **sizes)
    STAGES["grouped_gemm_ws"](**weight["w2"], **tokens)
    stage = Stage("post_permute_ws", ws, **sizes)
    POST_PERMUTE.into(
        (out,),
        rows=stage["down"],
        src2dst=stage["src2dst"],
        topk_weights=weights,
        topk_ids=ids,
        bias=given["w2_bias"],
        expert_start=start,
        routed_scaling_factor=routed_scaling_factor,
        mode="sum",
        dtype=out.dtype,
        backend=sizes["backend"],
    )


def _gemm_backend(layer: Layer, backend: str, device: torch.device) -> str:
    """The backend that `auto` gives the GEMMs of the whole call where the layout was asked for: by its rows, not by
    those of a part (backends.pick)."""
    if layer.layout != "contiguous" or backend != "auto" or device.type != "cuda":
        return backend
    return backends.of_layer(layer, device)


def _result(*, hidden_states, **_) -> tuple[TensorSpec]:
    return (TensorSpec.contiguous(*hidden_states.shape, dtype=hidden_states.dtype),)


define_ws(
    "fused_deepgemm_ws",
    "(Tensor(a!) ws, Tensor hidden_states, Tensor topk_weights, Tensor topk_ids, Tensor w13, Tensor? w13_scale, "
    "Tensor w2, Tensor? w2_scale, Tensor? w13_fp8, Tensor? w13_fp8_scale, Tensor? w2_fp8, Tensor? w2_fp8_scale, "
    "Tensor? w13_bias, Tensor? w2_bias, str activation, float? swiglu_limit, float? gemm1_alpha, "
    "float? gemm1_clamp_limit, int expert_start, float routed_scaling_factor, int max_workspace_bytes, "
    f"{LAYER_SCHEMA}) -> Tensor",
    _run,
    contract=_result,
)
