"""Family: how one line of models names and stores its experts; and the table of families."""

import re
from dataclasses import dataclass

from moe_ops import check
from moe_ops.checkpoints.files import Files
from moe_ops.checkpoints.layout import Layout, Sizes
from moe_ops.checkpoints.quantization import Quantization, read_quantization

ROOTS = ("model.", "", "model.language_model.", "language_model.model.")
"""What the names of a model's layers may begin with, a vision model's text half among them."""


@dataclass(frozen=True)
class Family:
    """Names under one layer, and the keys of config.json that give the sizes."""

    name: str
    model_types: tuple[str, ...]
    block: str
    """The MoE block of a layer, such as layers.{layer}.mlp."""
    layouts: tuple[Layout, ...]
    """Tried in order; the first whose probe is in the checkpoint."""
    num_experts: str
    intermediate: str
    router: str = "gate.weight"
    logit_bias: str | None = None
    """Added to the router's logits."""
    correction_bias: str | None = None
    """Added to the scores for the choice of experts only."""
    hash_table: str | None = None
    """(vocabulary, top_k) expert ids of layers that route by token id."""
    scale: str | None = None
    """What scale names end in, where it is not what the quantisation method says."""
    ignored: tuple[str, ...] = (".input_scale", ".activation_scale")
    """Ends of tensor names that are no part of the weights: activations are quantised as they come."""


@dataclass(frozen=True)
class Experts:
    """The experts of one layer of one checkpoint: where they are and what they look like."""

    family: Family
    layout: Layout
    quant: Quantization
    sizes: Sizes
    prefix: str
    """Of the MoE block's names, such as model.layers.3.mlp."""

    @property
    def experts_prefix(self) -> str:
        return f"{self.prefix}experts."


def choose(op: str, config: dict) -> Family:
    """The family of a config.json, by its model_type."""
    from moe_ops.checkpoints import FAMILIES

    known = {kind: family for family in FAMILIES for kind in family.model_types}
    model_type = config.get("model_type")
    fix = "Describe its names in a file beside moe_ops/checkpoints/qwen3.py, or call prepare_weights yourself."
    check.one_of(op, "model_type of config.json", model_type, tuple(known), fix)
    return known[str(model_type)]


def text_config(config: dict) -> dict:
    """The language model's part of config.json: a vision model nests it."""
    nested = config.get("text_config")
    if not nested:
        return config
    outer = {key: config[key] for key in ("quantization_config", "expert_dtype") if key in config}
    return {**outer, **nested}


def moe_layers(files: Files, family: Family) -> list[int]:
    """The layers that have experts, in order."""
    block = re.escape(family.block).replace(re.escape("{layer}"), r"(\d+)")
    pattern = re.compile("(?:" + "|".join(map(re.escape, ROOTS)) + ")" + block + "experts" + re.escape("."))
    return sorted({int(match[1]) for match in map(pattern.match, files.where) if match})


def find(files: Files, layer: int) -> Experts:
    """The experts of a layer, with every tensor's name, shape and dtype checked.

    Raises:
        ValueError, TypeError: a tensor is missing, extra, truncated or of another shape or dtype; names it, its file
            and what was expected.
    """
    op = files.op
    config = text_config(files.json("config.json"))
    family = choose(op, config)
    quant = read_quantization(op, config)
    if family.scale is not None and quant.kind != "float":
        quant = Quantization(quant.kind, family.scale, quant.block)
    keys = (family.num_experts, "hidden_size", family.intermediate)
    for key in keys:
        got = config.get(key)
        check.value(isinstance(got, int), op, f"{key} of config.json", "an integer", got, "Copy it from the model.")
    sizes = Sizes(*(config[key] for key in keys))

    block = family.block.format(layer=layer)
    names = set(files.where)
    for root in ROOTS:
        for layout in family.layouts:
            if f"{root}{block}experts.{layout.probe}" in names:
                found = Experts(family, layout, quant, sizes, f"{root}{block}")
                _check_names(files, found)
                return found
    layers = moe_layers(files, family)
    have = f"MoE layers {layers[0]} to {layers[-1]}" if layers else "no experts at all"
    probes = " or ".join(f"{ROOTS[0]}{block}experts.{layout.probe}" for layout in family.layouts)
    check.value(False, op, "layer", f"one with experts, such as {probes}", f"layer={layer}, {have}", "Choose another.")
    raise AssertionError


def _check_names(files: Files, experts: Experts) -> None:
    """Every expert tensor of the layer is there as it should be, and none is left over."""
    prefix = experts.experts_prefix
    wanted = set()
    for want in experts.layout.wants(experts.sizes, experts.quant):
        files.expect(prefix + want.suffix, want.shapes, want.dtypes)
        wanted.add(prefix + want.suffix)
    fix = f"config.json says E={experts.sizes.E} and {experts.quant.kind} weights: it is for another checkpoint."
    for name, file in files.where.items():
        if name.startswith(prefix) and name not in wanted and not name.endswith(experts.family.ignored):
            check.value(False, files.op, f"{name} in {file}", "a tensor that this model has", "an extra one", fix)
