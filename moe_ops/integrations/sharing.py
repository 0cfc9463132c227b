"""One workspace for the experts of a model's layers, which run one after another."""

from moe_ops import check
from moe_ops.arena import Workspace
from moe_ops.integrations.experts import CHILD, PreparedExperts
from moe_ops.integrations.modules import OP, ExpertsModule
from moe_ops.recipes import get_recipe
from moe_ops.sizes import Layer
from moe_ops.weight_format import FORMATS

_TOP_K = ("num_experts_per_tok", "num_experts_per_token", "experts_per_token", "moe_topk", "moe_k")
"""Names under which configurations keep the routes of a token."""


def share(modules: dict[str, ExpertsModule], max_tokens: int, top_k: int | None) -> Workspace:
    """Gives one arena to every module that runs moe::fused_deepgemm. The rest: see transformers.share_workspace."""
    op, sizes, sharing, devices = f"{OP}.share_workspace", [], [], set()
    for name, module in modules.items():
        child = module._modules.get(CHILD)
        fix = "Call prepare(model) first."
        check.value(isinstance(child, PreparedExperts), op, name or "model", "prepared", "experts that are not", fix)
        if child.call.formula is not None:  # others run functions of the model between the stages
            sizes.append(_sizes(op, name, module, child, top_k))
            sharing.append(child)
            devices.add(next(t for t in child.tensors(module).values() if t is not None).device)
    rule = "one with a gate that moe_ops has a formula for"
    check.value(bool(sharing), op, "model", rule, "none", "Its experts allocate what they need.")
    fix = "Call it once for the layers of each device."
    check.value(len(devices) == 1, op, "model", "on one device", sorted(map(str, devices)), fix)
    workspace = Workspace(sizes, max_tokens, devices.pop())
    for child in sharing:
        child.workspace = workspace
    return workspace


def _sizes(op: str, name: str, module: ExpertsModule, child: PreparedExperts, top_k: int | None) -> Layer:
    call, tensors = child.call, child.tensors(module)
    w2 = check.given(op, f"w2 of {name}", tensors["w2"], "by every prepared module")
    E, K, I = FORMATS[call.weight_format].sizes(w2, get_recipe(op, call.recipe).w_pack)
    return Layer(
        0,
        _top_k(op, name, module) if top_k is None else top_k,
        E,
        K,
        I,
        call.recipe,
        call.scale_format,
        weight_format=call.weight_format,
        has_fp8=tensors.get("w13_fp8") is not None,
    )


def _top_k(op: str, name: str, module: ExpertsModule) -> int:
    values = (getattr(module.config, attribute, None) for attribute in _TOP_K)
    found = [value for value in values if isinstance(value, int)]
    fix = "Pass top_k: how many experts a token goes to."
    check.value(bool(found), op, f"top_k of {name}", "in its configuration", "none of the known names", fix)
    return found[0]
