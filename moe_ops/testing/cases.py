"""Layer-sized inputs: a LayerCase names itself, builds its tensors from a seed and runs both the op and the judge."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from moe_ops import forward as _ops  # noqa: F401  registers the ops
from moe_ops.choice import layouts
from moe_ops.prep import MoEWeights, prepare_weights
from moe_ops.recipes import RECIPES, get_recipe
from moe_ops.reference.moe import moe
from moe_ops.sizes import Layer
from moe_ops.testing.decode import decode_weight

FORMS = [(recipe.name, scale_format) for recipe in RECIPES.values() for scale_format in recipe.scale_formats]
"""(recipe, scale format) of every form in which weights are prepared."""

DISTRIBUTIONS = ("uniform", "one_expert", "every_other", "foreign", "repeated")


def random_routing(T: int, E: int, top_k: int, distribution: str, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """(topk_weights (T, top_k) fp32, topk_ids (T, top_k) int32).

    uniform: distinct experts. one_expert: everything to expert E // 2, other slots -1. every_other: odd experts stay
    empty. foreign: ids from -1 to 2 E, so many are not on this rank. repeated: ids drawn with replacement.
    """
    weights = torch.rand(T, top_k, generator=generator) + 0.1
    if distribution == "uniform":
        ids = torch.rand(T, E, generator=generator).argsort(1)[:, :top_k]
    elif distribution == "one_expert":
        ids = torch.full((T, top_k), -1)
        ids[:, 0] = E // 2
    elif distribution == "every_other":
        even = torch.arange(0, E, 2)
        columns = torch.rand(T, len(even), generator=generator).argsort(1)[:, :top_k]
        ids = torch.full((T, top_k), -1)
        ids[:, : columns.shape[1]] = even[columns]
    elif distribution == "foreign":
        ids = torch.randint(-1, 2 * E, (T, top_k), generator=generator)
    elif distribution == "repeated":
        ids = torch.randint(0, E, (T, top_k), generator=generator)
    else:
        raise ValueError(f"random_routing: distribution must be one of {DISTRIBUTIONS}; got {distribution!r}.")
    return weights / weights.sum(1, keepdim=True), ids.int()


@dataclass(frozen=True)
class LayerCase:
    """One forward of the layer. `str(case)` reads aloud and is the test's id."""

    recipe: str
    scale_format: str | None = None
    layout: str = "auto"
    T: int = 37
    E: int = 4
    K: int = 256
    I: int = 128
    top_k: int = 2
    distribution: str = "uniform"
    bias: bool = False
    dtype: torch.dtype = torch.bfloat16
    seed: int = 0
    attributes: dict = field(default_factory=dict, hash=False)

    def __str__(self) -> str:
        parts = [self.recipe, self.scale_format, self.layout, f"E{self.E}-T{self.T}-K{self.K}-I{self.I}-k{self.top_k}"]
        parts += [self.distribution, "bias" if self.bias else None]
        parts += [f"{name}={value}" for name, value in self.attributes.items()]
        return "-".join(part for part in parts if part)

    def build(self) -> tuple[tuple[Tensor, Tensor, Tensor], MoEWeights]:
        """((hidden_states, topk_weights, topk_ids), weights)."""
        generator = torch.Generator().manual_seed(self.seed)

        def normal(*shape):
            return torch.randn(*shape, generator=generator)

        x = normal(self.T, self.K).to(self.dtype)
        w13 = normal(self.E, 2 * self.I, self.K) / self.K**0.5
        w2 = normal(self.E, self.K, self.I) / self.I**0.5
        weights = prepare_weights(
            w13,
            w2,
            recipe=self.recipe,
            scale_format=self.scale_format,
            w13_bias=normal(self.E, 2 * self.I) / 4 if self.bias else None,
            w2_bias=normal(self.E, self.K) / 4 if self.bias else None,
        )
        return (x, *random_routing(self.T, self.E, self.top_k, self.distribution, generator)), weights

    def run(self, inputs: tuple[Tensor, Tensor, Tensor], weights: MoEWeights, **more) -> Tensor:
        """The op under test."""
        arguments = {"layout": self.layout, "recipe": self.recipe, **self.attributes, **more}
        return torch.ops.moe.fused_deepgemm(*inputs, **weights.tensors(), **arguments)

    def judge(self, inputs: tuple[Tensor, Tensor, Tensor], weights: MoEWeights, **more) -> Tensor:
        """The judge on the same weights, dequantised by their format's definition."""
        row = get_recipe("judge", self.recipe)
        w13 = decode_weight(weights.w13, weights.w13_scale, row)
        w2 = decode_weight(weights.w2, weights.w2_scale, row)
        biases = dict(w13_bias=weights.w13_bias, w2_bias=weights.w2_bias)
        return moe(*inputs, w13, w2, **biases, **self.attributes, **more)

    @property
    def layouts(self) -> tuple[str, ...]:
        """auto, and every layout that holds this case."""
        scale_format = self.scale_format or get_recipe("case", self.recipe).scale_formats[0]
        sizes = (self.T, self.top_k, self.E, self.K, self.I)
        return ("auto", *layouts(Layer(*sizes, self.recipe, scale_format)))

    @property
    def max_diff(self) -> float:
        return get_recipe("judge", self.recipe).max_diff
