"""PreparedExperts: what moe_ops keeps in an experts module of transformers, and the call it makes with it."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe_ops import forward as _ops  # noqa: F401  registers the ops
from moe_ops.arena import Workspace
from moe_ops.integrations.modules import OP, ExpertsModule
from moe_ops.integrations.through_gate import through_gate
from moe_ops.prep.report import Padding, PrepReport

CHILD = "moe_ops"
"""Name of the child module."""


@dataclass(frozen=True)
class Call:
    """How one experts module calls the ops. Fixed when it is prepared."""

    recipe: str
    scale_format: str
    padding: Padding
    """Zeros behind the model's own K and I."""
    formula: tuple[tuple[str, str], ...] | None
    """Arguments of fused_deepgemm; None: functions of the model run between the stages. As text: Dynamo takes text for
    constants, but would trace a float as a variable and compile the graph twice."""
    weight_format: str = "natural"
    """How the weights are stored: weight_format.FORMATS."""
    own: tuple[tuple[str, str], ...] = ()
    """(argument, attribute) of the module's own tensors where the ops read those; empty for prepared ones."""

    def arguments(self) -> dict[str, str | float]:
        """The formula's arguments by name."""
        return {name: value if name == "activation" else float(value) for name, value in self.formula or ()}


class PreparedExperts(nn.Module):
    """The call, and the weights that had to be made anew.

    These are buffers, so `.to(device)` works; casting (`.half()`) leaves them alone, because fp8 values and scales are
    floats to it. `state_dict()` refuses: no checkpoint loader knows what it would write.

    Args:
        tensors: by the names of fused_deepgemm; empty if the call uses the module's own.
        report: what preparation did, or None.
    """

    def __init__(self, call: Call, tensors: dict[str, Tensor | None], report: PrepReport | None):
        super().__init__()
        self.call, self.names, self.report = call, tuple(tensors), report
        self.workspace: Workspace | None = None
        for name, tensor in tensors.items():
            if tensor is None:  # not a buffer: torch.export counts buffers that are None, and miscounts
                setattr(self, name, None)
            else:
                self.register_buffer(name, tensor)

    def tensors(self, module: ExpertsModule) -> dict[str, Tensor | None]:
        """By the names of fused_deepgemm."""
        if self.call.own:
            return {argument: getattr(module, attribute, None) for argument, attribute in self.call.own}
        return {name: getattr(self, name) for name in self.names}

    def memory(self) -> dict[str, Any]:
        """What fused_deepgemm is told of storage, where it is not the default: Dynamo guards each argument."""
        told: dict[str, Any] = {} if self.workspace is None else dict(workspace=self.workspace.arena)
        if self.call.weight_format != "natural":
            told["weight_format"] = self.call.weight_format
        return told

    def extra_repr(self) -> str:
        gate = self.call.formula and ", ".join(f"{name}={value}" for name, value in self.call.formula)
        weights = self.report or f"{self.call.recipe} weights as the module has them"
        return f"{weights}; {gate or 'functions of the model between the stages'}"

    def _apply(self, fn, recurse=True):
        before = dict(self.named_buffers(recurse=False))
        super()._apply(fn, recurse)
        for name, tensor in before.items():
            moved = getattr(self, name)
            if moved.dtype != tensor.dtype:
                setattr(self, name, tensor.to(moved.device))
        return self

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        if self._buffers and not keep_vars:  # torch.export asks to keep variables, whoever saves does not
            raise RuntimeError(
                f"{OP}: {prefix.removesuffix(f'{CHILD}.')}* must not be saved; its weights are prepared for "
                f"{self.call.recipe}, and the checkpoint's are freed. Save the model before prepare(), or write "
                "prepared weights with `moe-ops convert`."
            )
        super()._save_to_state_dict(destination, prefix, keep_vars)


class Freed:
    """Stands where a weight was: whatever reads it is told why it is gone."""

    def __init__(self, name: str, recipe: str):
        vars(self).update(name=name, recipe=recipe)

    def __getitem__(self, index):
        raise RuntimeError(
            f"{OP}: {self.name} must not be read; it was freed when the experts were prepared for {self.recipe}. "
            "model.set_experts_implementation('moe_ops'), or reload the model."
        )

    def __getattr__(self, attribute: str):
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        return self[attribute]


def run(module: ExpertsModule, hidden_states: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
    """(T, K) -> (T, K): the routed experts of a prepared module."""
    child = module._modules.get(CHILD)
    if child is None:
        name = type(module).__name__
        raise RuntimeError(f"{OP}: {name} must be prepared before it is traced; it is not. Call prepare(model) first.")
    call, tensors, K = child.call, child.tensors(module), hidden_states.shape[-1]
    x = F.pad(hidden_states, (0, call.padding.K)) if call.padding.K else hidden_states
    if call.formula is None:
        out = through_gate(module, call, tensors, x, topk_ids, topk_weights)
    else:
        given = dict(**tensors, recipe=call.recipe, **call.arguments(), **child.memory())
        out = torch.ops.moe.fused_deepgemm(x, topk_weights, topk_ids, **given)
    return out[:, :K] if call.padding.K else out
