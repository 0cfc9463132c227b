"""What the `_ws` stages share: the sizes in their schemas, and the way from a flat workspace to named tensors."""

import torch

from moe_ops import check
from moe_ops.choice import choose
from moe_ops.planner import BufferPlan, plan_layer
from moe_ops.report import note
from moe_ops.rows import FUSED, gathered_block
from moe_ops.sizes import Layer

LAYER_SCHEMA = (
    "str backend, SymInt T, int top_k, int E, int K, int I, str recipe, str scale_format, str layout, "
    "int num_experts, str weight_format, bool has_fp8"
)
"""Ends the schema of every stage. `layout` may be auto: the kernel decides from the concrete T."""

FIRST = "pre_permute_ws"
"""The stage that a forward begins with."""


def sizes_of(layer: Layer, backend: str) -> tuple:
    """The backend and the layer's sizes in the order of LAYER_SCHEMA."""
    names = [argument.split()[1] for argument in LAYER_SCHEMA.split(", ")]
    return (backend, *(getattr(layer, name) for name in names[1:]))


class Stage:
    """One stage's view of the workspace: `stage["x_q"]` is a buffer of the plan, `stage.layer` its sizes."""

    def __init__(self, op: str, ws: torch.Tensor, *outside: torch.Tensor | None, backend: str, **sizes):
        """`outside` are the tensors that the stage reads beside the workspace: they must not lie in it."""
        layer = Layer(**sizes)
        check.value(layer.T >= 0, op, "T", "at least 0", layer.T, "It counts tokens.")
        choice = choose(op, layer, backend, ws.device)
        if op == FIRST:
            note(layer, backend, ws.device)
        self.gemm_backend = choice.backend
        self.fp8 = choice.fp8
        self.plan: BufferPlan = plan_layer(layer, choice)
        self.layer = self.plan.layer
        self._ws = ws
        check.workspace(op, ws, self.plan.total_bytes)
        check.apart(op, ws, *outside)

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.plan.view(name, self._ws)

    def weight(self, w, w_scale, w_fp8, w_fp8_scale) -> dict:
        """What the GEMMs are told of a weight: as it is, or as fp8 blocks where the choice says so."""
        form = dict(recipe=self.layer.recipe, backend=self.gemm_backend)
        return dict(w=w_fp8, w_scale=w_fp8_scale, **form) if self.fp8 else dict(w=w, w_scale=w_scale, **form)

    @property
    def fused(self) -> bool:
        """Whether GEMM1 ends with the activation."""
        return self.layer.layout in FUSED

    @property
    def block_m(self) -> int:
        """Rows of a tile in the gathered layout."""
        return gathered_block(self.layer.whole, self.layer.top_k, self.layer.experts)

    def row_map(self) -> dict[str, torch.Tensor]:
        """The argument that says which rows are whose: m_indices or masked_m."""
        name = "m_indices" if self.layer.layout == "contiguous" else "masked_m"
        return {name: self[name]}
