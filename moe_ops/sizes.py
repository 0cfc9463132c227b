"""Layer: the sizes of one call of an expert layer, which fix its layout, its buffers and every shape in it."""

from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Layer:
    """T (tokens, possibly traced) and top_k come with the call, the rest with the weights."""

    T: Any
    top_k: int
    E: int
    K: int
    I: int
    recipe: str
    scale_format: str
    layout: str = "auto"
    num_experts: int = -1
    """Of all ranks together; -1: E. Only tuning depends on it."""
    weight_format: str = "natural"
    has_fp8: bool = False
    """Whether the weights are there as fp8 blocks too."""
    of: int = -1
    """Tokens of the whole call that these T are a part of; -1: T. Layout, backend and tiles are chosen by it, so that
    parts are computed as the whole would be."""

    @property
    def experts(self) -> int:
        return self.E if self.num_experts == -1 else self.num_experts

    @property
    def whole(self) -> Any:
        """Tokens of the whole call."""
        return self.T if self.of == -1 else self.of

    def as_fp8(self) -> "Layer":
        """The same layer, computed from its weights as fp8 blocks."""
        form = dict(recipe="fp8_block", scale_format="fp32", weight_format="natural")
        return replace(self, **form, has_fp8=False)

    def with_layout(self, layout: str, T=None) -> "Layer":
        return replace(self, layout=layout, T=self.T if T is None else T)
