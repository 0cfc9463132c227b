"""Prepares one experts module: decides the form, converts what must be, frees what was."""

from typing import NamedTuple

import torch
from torch import Tensor

from moe_ops import check
from moe_ops.integrations.experts import CHILD, Call, Freed, PreparedExperts
from moe_ops.integrations.gates import recognise
from moe_ops.integrations.modules import NAMES, OP, ExpertsModule, View, view
from moe_ops.meta.grouped_gemm import check_weight
from moe_ops.prep.builder import PARTS, Builder
from moe_ops.prep.decide import Path, decide
from moe_ops.prep.repack_weights import repack_weights
from moe_ops.prep.report import Padding, PrepReport
from moe_ops.prep.weights import MoEWeights
from moe_ops.recipes import get_recipe
from moe_ops.weight_format import FORMATS


class Made(NamedTuple):
    """What preparation made of one module."""

    tensors: dict[str, Tensor | None]
    """By the names of fused_deepgemm."""
    padding: Padding
    """Zeros that they count."""
    report: PrepReport | None
    weight_format: str = "natural"
    weights: MoEWeights | None = None
    """The same as prepare_weights would hold them; None for experts without a gate."""


def prepare_experts(
    module: ExpertsModule,
    name: str,
    *,
    recipe: str | None = None,
    scale_format: str | None = None,
    on_inexact: str = "raise",
    repack: bool = False,
    fp8_copy: bool = True,
) -> PrepReport | None:
    """Gives the module its child `moe_ops`, and frees the weights that the child holds in another form.

    Args:
        name: of the module, for the sentences of errors. Others: as in transformers.prepare.

    Returns:
        What was done; None where the weights are used as they are.
    """
    child = module._modules.get(CHILD)
    if isinstance(child, PreparedExperts) and not child.call.own:
        return _prepared(child, name, repack, recipe=recipe, scale_format=scale_format)
    with torch.inference_mode(False), torch.no_grad():  # what is made here outlives the first call's inference_mode
        given = view(module, name)
        recipe = recipe or ("mxfp4" if repack else None)
        path = decide(given.kind, recipe=recipe, scale_format=scale_format, device=given.device, op=OP)
        formula = _formula(module, given)
        if repack:
            got, fix = "another", "Prepare it without repack."
            check.value(formula is not None, OP, f"the gate of {name}", "one with a formula, for repack", got, fix)
        elif _fits(given, path):
            own = tuple(NAMES[given.gated].items())
            call = Call(path.recipe, path.scale_format, Padding(), formula, own=own)
            module.add_module(CHILD, PreparedExperts(call, {}, None))
            return None
        offloaded = getattr(getattr(module, "_hf_hook", None), "offload", False)
        fix = "Load the model without offloading, or in bf16, which is used as it is."
        check.value(not offloaded, OP, f"the weights of {name}", "in memory for good", "offloaded ones", fix)
        made = _build(given, path, name, on_inexact)
        if repack:
            made = _repacked(made, fp8_copy)
        call = Call(path.recipe, path.scale_format, made.padding, formula, made.weight_format)
        child = PreparedExperts(call, made.tensors, made.report)
    for attribute in NAMES[given.gated].values():
        if getattr(module, attribute, None) is not None:
            # None, not deleted: transformers puts sharded parameters back after each forward, by name.
            module._parameters[attribute] = None
            vars(module)[attribute] = Freed(f"{attribute} of {name}", path.recipe)
    module.add_module(CHILD, child)
    return made.report


def _prepared(child: PreparedExperts, name: str, repack: bool, **wanted: str | None) -> PrepReport | None:
    for argument, value in wanted.items():
        got, fix = getattr(child.call, argument), "It is prepared already: reload the model to choose again."
        check.value(value in (None, got), OP, f"{argument} of {name}", got, value, fix)
    stored = child.call.weight_format
    fix = "It is prepared already: reload the model to choose again."
    check.value(not repack or FORMATS[stored].repacked, OP, f"the weights of {name}", "repacked", stored, fix)
    return child.report


def _formula(module: ExpertsModule, given: View) -> tuple[tuple[str, str], ...] | None:
    if not given.gated or getattr(module, "has_post_expert_norm", False):
        return None
    found = recognise(module, given.sizes[2], given.device)
    return None if found is None else tuple((name, str(value)) for name, value in found.items())


def _fits(given: View, path: Path) -> bool:
    """Whether the module's own tensors are in the form that the path leads to: the ops' contract decides."""
    if given.reordered:
        return False
    E, K, I = given.sizes
    row, shapes = get_recipe(OP, path.recipe), {"w13": (E, given.halves * I, K), "w2": (E, K, I)}
    try:
        formats = {
            check_weight(OP, name, given[name], given.tensors[f"{name}_scale"], shape, "(E, N, K)", row)
            for name, shape in shapes.items()
        }
    except (TypeError, ValueError):
        return False
    return formats == {path.scale_format}


def _build(given: View, path: Path, name: str, on_inexact: str) -> Made:
    if not given.gated:
        return _build_ungated(given, path, name)
    E, K, I = given.sizes
    builder = Builder(f"{OP} ({name})", path, E=E, I=I, K=K, device=given.device, on_inexact=on_inexact)
    for expert in range(E):
        for part in PARTS:
            builder.put(expert, part, given.source(expert, part))
    made = builder.finish(given.w13_bias(), given.tensors["w2_bias"])
    return Made(made.tensors(), made.padding, made.report, weights=made)


def _repacked(made: Made, fp8_copy: bool) -> Made:
    assert made.weights is not None  # a gate with a formula has one
    packed = repack_weights(made.weights, fp8=fp8_copy)
    return made._replace(tensors=packed.tensors(), weight_format=packed.weight_format, weights=packed)


def _build_ungated(given: View, path: Path, name: str) -> Made:
    """Experts without a gate, floats to bf16. A Builder fills pairs of gate and up rows, which they have not."""
    if given.kind != "float" or get_recipe(OP, path.recipe).quantised:
        E, K, I = given.sizes
        rule = "bf16, or the form that the weights have, where experts have no gate"
        got = f"{path.recipe} {path.scale_format} from {given.kind} of K={K}, I={I}"
        fix = "Load the model in bf16, or use experts_implementation='eager'."
        raise NotImplementedError(check.sentence(OP, f"the recipe of {name}", rule, got, fix))
    tensors, error, norm = dict(given.tensors), 0.0, 0.0
    for key in ("w13", "w2"):
        made = torch.empty(given[key].shape, dtype=torch.bfloat16, device=given.device)
        for expert, source in enumerate(given[key]):
            made[expert] = source
            error += float((made[expert].double() - source.double()).square().sum())
            norm += float(source.double().square().sum())
        tensors[key] = made
    report = PrepReport(
        path=path.name,
        source=path.source,
        recipe=path.recipe,
        scale_format=path.scale_format,
        bytes_in=sum(given[key].nbytes for key in ("w13", "w2")),
        bytes_out=sum(tensor.nbytes for key, tensor in tensors.items() if key in ("w13", "w2") and tensor is not None),
        relative_error=(error / norm) ** 0.5 if norm else 0.0,
    )
    return Made(tensors, Padding(), report)
