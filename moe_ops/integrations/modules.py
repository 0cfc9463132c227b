"""How transformers' experts modules hold their weights, and one view of them all.

`use_experts_implementation` gives a module five facts: has_gate, has_bias, is_transposed, is_concatenated and, from
5.24 on, has_post_expert_norm. With the table of names below they say everything; no family is named here.
"""

from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from moe_ops import check
from moe_ops.prep.source import BLOCK, CODES, E4M3, SCALE_DTYPES, Source, exponents, finite, pack_of, scale_shape
from moe_ops.recipes import FLOATS

OP = "moe_ops.integrations.transformers"

ExpertsModule: TypeAlias = Any
"""An nn.Module whose class is under transformers' use_experts_implementation."""

# Argument of fused_deepgemm -> attribute of the module, with a gate and without one.
NAMES = {
    True: {
        "w13": "gate_up_proj",
        "w13_scale": "gate_up_proj_scale_inv",
        "w2": "down_proj",
        "w2_scale": "down_proj_scale_inv",
        "w13_bias": "gate_up_proj_bias",
        "w2_bias": "down_proj_bias",
    },
    False: {
        "w13": "up_proj",
        "w13_scale": "up_proj_scale_inv",
        "w2": "down_proj",
        "w2_scale": "down_proj_scale_inv",
        "w13_bias": "up_proj_bias",
        "w2_bias": "down_proj_bias",
    },
}

_BLOCK_KINDS = {(1, 32): "mxfp8"}
"""Kind of an fp8 source by its block_size, where it is not fp8_block."""


def is_experts(module: nn.Module) -> bool:
    """Whether transformers' use_experts_implementation made this module's class."""
    facts = {"has_gate", "has_bias", "is_transposed", "is_concatenated"}
    return facts <= vars(module).keys()  # not hasattr: a wrapper passes on what it wraps


@dataclass(frozen=True, eq=False)
class View:
    """The weights of one experts module, not yet converted: nothing here is a copy."""

    kind: str
    """One of prep.source.SOURCES."""
    tensors: dict[str, Tensor | None]
    """By the names of fused_deepgemm. w13 (E, N, K) and w2 (E, K, I), whatever the module's own order of axes."""
    scales: dict[str, Tensor | None]
    """Of w13 and w2, checked, in the dtype that Source wants."""
    gated: bool
    """N is 2 I: gate and up rows. Else I."""
    reordered: bool
    """w13 and w2 are transposed views, or gate and up rows take turns: other than fused_deepgemm reads them."""
    interleaved: bool
    """Gate and up rows take turns. Else gate rows lie over up rows."""
    block: tuple[int, int] = BLOCK

    def __getitem__(self, name: str) -> Tensor:
        """A tensor that every module has: w13 or w2."""
        tensor = self.tensors[name]
        assert tensor is not None
        return tensor

    @property
    def device(self) -> torch.device:
        return self["w2"].device

    @property
    def halves(self) -> int:
        return 2 if self.gated else 1

    @property
    def sizes(self) -> tuple[int, int, int]:
        """E, K, I."""
        E, K, stored = self["w2"].shape
        return E, K, stored * pack_of(self.kind)

    def source(self, expert: int, part: str) -> Source:
        """One matrix: gate or up (I, K), or down (K, I)."""
        name = "w2" if part == "down" else "w13"
        values, scale = self[name][expert], self.scales[name]
        scale = None if scale is None else scale[expert]
        if part != "down":
            values = self._half(values, part)
            scale = None if scale is None else self._half(scale, part)
        if self.kind == "fp8_tensor" and scale is not None:
            scale = scale.reshape(())
        return Source(self.kind, values, scale, self.block)

    def w13_bias(self) -> Tensor | None:
        """(E, 2 I), gate over up."""
        bias = self.tensors["w13_bias"]
        if bias is None or not self.interleaved:
            return bias
        return torch.cat((bias[:, 0::2], bias[:, 1::2]), 1)

    def _half(self, rows: Tensor, part: str) -> Tensor:
        half = 0 if part == "gate" else 1
        return rows[half::2] if self.interleaved else rows.chunk(2)[half]


def view(module: ExpertsModule, name: str) -> View:
    """Reads a module. `name` is for the sentences of errors.

    Raises:
        ValueError: a weight is missing, elsewhere than in memory, or of a shape that no source has. TypeError: its type
            or dtype. NotImplementedError: fp8 with static activation scales.
    """
    if getattr(module, "activation_scheme", "dynamic") == "static":
        fix = "Load it with activation_scheme='dynamic', or use experts_implementation='eager'."
        sentence = check.sentence(OP, f"activation_scheme of {name}", "dynamic", "static", fix)
        raise NotImplementedError(sentence)
    names = NAMES[module.has_gate]
    tensors = {ours: _tensor(module, name, theirs) for ours, theirs in names.items()}
    weights = {}
    for ours in ("w13", "w2"):
        argument = f"{names[ours]} of {name}"
        w = check.given(OP, argument, tensors[ours], "by every experts module")
        check.dtype(OP, argument, w, (*FLOATS, E4M3, *CODES), "No recipe takes others.")
        check.value(w.dim() == 3, OP, argument, "of 3 axes", tuple(w.shape), "Stack the experts.")
        weights[ours] = w.transpose(1, 2) if module.is_transposed else w
    block = getattr(module, "block_size", None)
    interleaved = module.has_gate and not module.is_concatenated
    made = View(
        kind=_kind(weights["w13"].dtype, block),
        tensors=tensors | weights,
        scales={"w13": None, "w2": None},
        gated=module.has_gate,
        reordered=module.is_transposed or interleaved,
        interleaved=interleaved,
        block=BLOCK if block is None else tuple(block),
    )
    _check_sizes(made, name, names)
    return made


def _tensor(module: ExpertsModule, name: str, attribute: str) -> Tensor | None:
    tensor = getattr(module, attribute, None)
    if tensor is None:
        return None
    if hasattr(tensor, "to_local"):  # sharded by transformers: this rank's part is what its forward sees
        tensor = tensor.to_local()
    argument = f"{attribute} of {name}"
    if tensor.is_meta or isinstance(tensor, FakeTensor):
        fix = "Load the model without offloading; before torch.export, call prepare(model) from this module."
        check.value(False, OP, argument, "in memory", "a tensor without data", fix)
    plain = type(tensor) in (Tensor, nn.Parameter, nn.Buffer)
    fix = "Load the model without that quantisation, and choose a recipe of moe_ops."
    if not plain:
        raise TypeError(check.sentence(OP, argument, "a plain tensor", type(tensor).__name__, fix))
    return tensor.detach()


def _kind(dtype: torch.dtype, block) -> str:
    if dtype in FLOATS:
        return "float"
    if dtype in CODES:
        return "mxfp4"
    return "fp8_tensor" if block is None else _BLOCK_KINDS.get(tuple(block), "fp8_block")


def _check_sizes(made: View, name: str, names: dict[str, str]) -> None:
    E, K, I = made.sizes
    shape = (E, made.halves * I, K // pack_of(made.kind))
    check.shape(OP, f"{names['w13']} of {name}", made["w13"], shape, "(E, N, K)", "E, I and K are down_proj's.")
    if made.kind == "float":
        return
    order = "(E, N, K) with the gate rows over the up rows, where it is quantised"
    fix = "Load the model without that quantisation, and choose a recipe of moe_ops."
    check.value(not made.reordered, OP, f"{names['w13']} of {name}", order, "another order", fix)
    for ours, (N, depth, parts) in {"w13": (I, K, made.halves), "w2": (K, I, 1)}.items():
        argument = f"{names[f'{ours}_scale']} of {name}"
        scale = check.given(OP, argument, made.tensors[f"{ours}_scale"], "beside quantised weights")
        check.dtype(OP, argument, scale, SCALE_DTYPES[made.kind], f"Scales of {made.kind} come in these.")
        rows, columns = scale_shape(made.kind, N, depth, made.block) or (1, 1)
        fix = "A block must not lie across the gate and the up half."
        check.shape(OP, argument, scale, (E, parts * rows, columns), "(E, rows, groups)", fix)
        read = exponents if made.kind in ("mxfp4", "mxfp8") else finite
        made.scales[ours] = read(OP, argument, scale)
