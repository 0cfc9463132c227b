"""transformers' experts implementation "grouped_mm", compiled as one graph: bf16."""

import importlib.util
from types import MethodType, SimpleNamespace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_ops.bench.cases import Case
from moe_ops.bench.peers.peer import Peer


def experts_module(case: Case, **more) -> Any:
    """What transformers' experts functions read of a module, around this case's weights."""
    from transformers.integrations import moe

    module = SimpleNamespace(
        num_experts=case.shape.E,
        has_gate=True,
        has_bias=False,
        is_transposed=False,
        is_concatenated=True,
        has_post_expert_norm=False,
        gate_up_proj=case.weights.w13,
        down_proj=case.weights.w2,
        act_fn=F.silu,
        config=SimpleNamespace(hidden_act="silu"),
        _is_expert_parallel=False,
        **more,
    )
    module._apply_gate = MethodType(moe._default_apply_gate, module)
    return module


def why_no_transformers() -> str | None:
    """Whether transformers is missing: a sentence, or None."""
    found = importlib.util.find_spec("transformers")
    return None if found else "transformers is not installed. pip install 'fused-moe-ops[hf]'."


class CompiledExperts(Peer):
    """An experts function under torch.compile. Compiled anew for each shape, and once more for tokens as a symbol."""

    fullgraph: ClassVar[bool]
    _last: ClassVar[tuple[Any, Any] | None] = None

    def prepare(self) -> None:
        kind = type(self)
        if kind._last is None or kind._last[0] is not self.case.weights:
            torch._dynamo.reset()  # else the sizes of the shape before would make these symbols
            kind._last = (self.case.weights, torch.compile(self.function(), fullgraph=self.fullgraph))
        self._compiled = kind._last[1]
        self._module = self.module()
        x, topk_weights, topk_ids = self.case.inputs
        self._inputs = (x, topk_ids.long(), topk_weights)
        self.run()

    def run(self) -> Tensor:
        return self._compiled(self._module, *self._inputs)

    def function(self) -> Any:
        """transformers' function."""
        raise NotImplementedError

    def module(self) -> Any:
        """What it gets for a module."""
        return experts_module(self.case)


class TransformersGroupedMM(CompiledExperts):
    name = "transformers grouped_mm"
    recipe = "bf16"
    fullgraph = True

    def why_not(self) -> str | None:
        return why_no_transformers()

    def function(self) -> Any:
        from transformers.integrations.moe import grouped_mm_experts_forward

        return grouped_mm_experts_forward
