"""What the `_ws` stages share: the sizes in their schemas, and the way from a flat workspace to named tensors."""

import torch

from moe_ops import check
from moe_ops.planner import BufferPlan, Layer, plan_layer
from moe_ops.rows import LAYOUTS

LAYER_SCHEMA = "SymInt T, int top_k, int E, int K, int I, str recipe, str scale_format, str layout"
"""Ends the schema of every stage. `layout` may be auto: the kernel decides from the concrete T."""


def sizes_of(layer: Layer) -> tuple:
    """The layer's sizes in the order of LAYER_SCHEMA."""
    return tuple(getattr(layer, argument.split()[1]) for argument in LAYER_SCHEMA.split(", "))


class Stage:
    """One stage's view of the workspace: `stage["x_q"]` is a buffer of the plan, `stage.layer` its sizes."""

    def __init__(self, op: str, ws: torch.Tensor, *outside: torch.Tensor | None, **sizes):
        """`outside` are the tensors that the stage reads beside the workspace: they must not lie in it."""
        layer = Layer(**sizes)
        check.one_of(op, "layout", layer.layout, LAYOUTS)
        check.value(layer.T >= 0, op, "T", "at least 0", layer.T, "It counts tokens.")
        self.plan: BufferPlan = plan_layer(layer)
        self.layer = self.plan.layer
        self._ws = ws
        check.workspace(op, ws, self.plan.total_bytes)
        check.apart(op, ws, *outside)

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.plan.view(name, self._ws)

    @property
    def contiguous(self) -> bool:
        return self.layer.layout == "contiguous"

    def row_map(self) -> dict[str, torch.Tensor]:
        """The argument that says which rows are whose: m_indices or masked_m."""
        name = "m_indices" if self.contiguous else "masked_m"
        return {name: self[name]}
