"""One case: a layer's shape, its weights in one recipe, a token count, a routing; what it must cost, and must give."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from moe_ops.arch import default_scale_format
from moe_ops.bench.routing import routing
from moe_ops.bench.timing import Rates
from moe_ops.choice import choose
from moe_ops.forward import fused_deepgemm
from moe_ops.planner import BufferPlan, plan_layer
from moe_ops.prep import MoEWeights, prepare_weights, repack_weights
from moe_ops.recipes import RECIPES, Recipe, get_recipe
from moe_ops.sizes import Layer

REPACKED = "_repacked"
"""Ends the name of a recipe whose weights are repacked for Hopper, with their copy as fp8 blocks."""

RECIPE_NAMES = ("fp8_block", f"mxfp4{REPACKED}", "bf16", "mxfp8", "mxfp4")
"""In the order in which they are timed."""

CHECKED_TOKENS = 512
"""More tokens than that are compared on so many of them, drawn at random: the reference is plain torch."""


@dataclass(frozen=True)
class Shape:
    """Experts on this rank, hidden size, intermediate size, routes a token."""

    name: str
    E: int
    K: int
    I: int
    top_k: int


SHAPES = (
    Shape("qwen3-30b-a3b", 128, 2048, 768, 8),
    Shape("deepseek-v3-ep8", 32, 7168, 2048, 8),
    Shape("tiny", 8, 256, 128, 2),
)


def layer_weights(shape: Shape, recipe: str, device: torch.device) -> MoEWeights:
    """Random experts, prepared for this device. recipe: one of RECIPE_NAMES."""
    generator = torch.Generator(device).manual_seed(0)

    def normal(*sizes: int) -> Tensor:
        return torch.randn(*sizes, dtype=torch.bfloat16, device=device, generator=generator) / sizes[-1] ** 0.5

    w13, w2 = normal(shape.E, 2 * shape.I, shape.K), normal(shape.E, shape.K, shape.I)
    name = recipe.removesuffix(REPACKED)
    weights = prepare_weights(w13, w2, recipe=name, scale_format=default_scale_format(RECIPES[name], device))
    return weights if name == recipe else repack_weights(weights, fp8=True)


@dataclass(frozen=True, eq=False)
class Case:
    """Inputs are drawn from a seed: the same case has the same tensors in every run."""

    shape: Shape
    T: int
    recipe: str
    """One of RECIPE_NAMES."""
    weights: MoEWeights
    routing: str = "uniform"

    @property
    def device(self) -> torch.device:
        return self.weights.w2.device

    @cached_property
    def inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        """hidden_states (T, K) bf16, topk_weights, topk_ids."""
        generator = torch.Generator(self.device).manual_seed(self.T)
        x = torch.randn(self.T, self.shape.K, dtype=torch.bfloat16, device=self.device, generator=generator)
        weights, ids = routing(self.routing, self.T, self.shape.E, self.shape.top_k, self.T)
        return x, weights.to(self.device), ids.to(self.device)

    def run(self, backend: str, layout: str = "auto") -> Tensor:
        arguments: dict[str, Any] = self.weights.tensors() | self.weights.attributes()
        return fused_deepgemm(*self.inputs, **arguments, layout=layout, backend=backend)

    def plan(self, backend: str, layout: str = "auto") -> BufferPlan:
        """Of the forward that `run` makes."""
        weights, shape = self.weights, self.shape
        sizes = (self.T, shape.top_k, shape.E, shape.K, shape.I)
        form: dict[str, Any] = dict(weight_format=weights.weight_format, has_fp8=weights.fp8 is not None)
        layer = Layer(*sizes, weights.recipe, weights.scale_format, layout, **form)
        return plan_layer(layer, choose("bench", layer, backend, self.device))

    @cached_property
    def routes(self) -> int:
        """Routes that lead to an expert."""
        return int((self.inputs[2] >= 0).sum())

    @cached_property
    def touched(self) -> int:
        """Experts with at least one route."""
        ids = self.inputs[2]
        return len(ids[ids >= 0].unique())

    @property
    def format(self) -> Recipe:
        return get_recipe("bench", self.weights.recipe)

    @property
    def weight_bytes(self) -> float:
        """Of the touched experts' weights, each once, without their scales (6 % in mxfp4, 3 % in mxfp8)."""
        return self.touched * 3 * self.shape.I * self.shape.K * self.format.w_dtype.itemsize / self.format.w_pack

    @property
    def operations(self) -> int:
        return 6 * self.routes * self.shape.I * self.shape.K

    def floor_us(self, rates: Rates) -> float:
        """No layer of this recipe is much faster: the longer of reading those weights and doing those operations."""
        rate = rates.fp8 if self.format.quantised else rates.bf16
        return 1e6 * max(self.weight_bytes / rates.copy, self.operations / rate)

    @cached_property
    def checked(self) -> Tensor | None:
        """Tokens to compare; None: all. Rows of the result do not depend on one another."""
        if self.T <= CHECKED_TOKENS:
            return None
        generator = torch.Generator().manual_seed(self.T)
        return torch.randperm(self.T, generator=generator)[:CHECKED_TOKENS].sort().values.to(self.device)

    @cached_property
    def expected(self) -> Tensor:
        """What the reference backend gives for the checked tokens, from the weights that this token count is computed
        from."""
        inputs = self.inputs if self.checked is None else tuple(t[self.checked] for t in self.inputs)
        as_fp8 = self.plan("auto").layer.recipe != self.weights.recipe
        weights = self.weights.fp8 if as_fp8 and self.weights.fp8 is not None else self.weights
        arguments: dict[str, Any] = weights.tensors() | weights.attributes()
        return fused_deepgemm(*inputs, **arguments, backend="reference")

    def of_checked(self, out: Tensor) -> Tensor:
        """The checked rows of a result."""
        return out if self.checked is None else out[self.checked]
