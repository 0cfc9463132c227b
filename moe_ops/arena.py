"""Workspace: one arena of scratch memory for all MoE layers of a model."""

import itertools
from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor, nn

from moe_ops import check
from moe_ops.planner import workspace_bytes
from moe_ops.sizes import Layer


class Workspace(nn.Module):
    """A flat uint8 buffer with one address, which layers that run one after another use in turn.

    It is no part of a state dict, moves with `.to(device)`, and a deep copy of the model has one of its own, which the
    copied layers share. torch.compile takes a module's buffer for static, so CUDA graphs of mode="reduce-overhead" are
    not skipped although the ops write to it. Layers on streams that overlap need one each.

    Args:
        layers: sizes of every layer that shares it (MoELayer.sizes), or one of them. Their T is not looked at.
        max_tokens: the most tokens of one call. More are refused, in words, or run in parts where the layer has
            max_workspace_bytes.
        device: where. On a card the arena is as long as that card's layouts need; elsewhere as long as any device's.
        backends: those of the layers.

    Raises:
        ValueError: no layers, or no tokens.
    """

    arena: Tensor

    def __init__(
        self,
        layers: Layer | Iterable[Layer],
        max_tokens: int,
        device: torch.device | str,
        backends: Iterable[str] = ("auto",),
    ):
        super().__init__()
        self._backends = tuple(dict.fromkeys(backends))
        self._layers = (layers,) if isinstance(layers, Layer) else tuple(dict.fromkeys(layers))
        check.value(len(self._layers) > 0, "Workspace", "layers", "at least one", 0, "Pass MoELayer.sizes.")
        self._outgrown: list[Tensor] = []
        self.max_tokens = 0
        self.register_buffer("arena", torch.empty(0, dtype=torch.uint8, device=device), persistent=False)
        self.grow(max_tokens)

    @property
    def nbytes(self) -> int:
        """Bytes of the arena in use."""
        return self.arena.numel()

    @property
    def outgrown_bytes(self) -> int:
        """Bytes of earlier arenas that are kept for the graphs that captured them."""
        return sum(arena.numel() for arena in self._outgrown)

    def grow(self, max_tokens: int) -> None:
        """Makes room for calls of max_tokens tokens. The address changes, so that graphs captured before go on using
        the arena that they captured: it is kept until release()."""
        check.value(max_tokens >= 1, "Workspace", "max_tokens", "at least 1", max_tokens, "It counts tokens.")
        if max_tokens <= self.max_tokens:
            return
        needed = self._needed(max_tokens)
        if needed > self.nbytes:
            arena = torch.empty(needed, dtype=torch.uint8, device=self.arena.device)  # if it fails, nothing has changed
            if self.nbytes:
                self._outgrown.append(self.arena)
            self.arena = arena
        self.max_tokens = max_tokens

    def _needed(self, max_tokens: int) -> int:
        card = self.arena.device if self.arena.is_cuda else None
        calls = itertools.product(self._layers, self._backends)
        return max(int(workspace_bytes(replace(layer, T=max_tokens), backend, card)) for layer, backend in calls)

    def _apply(self, fn, recurse=True):
        """On another device other layouts are taken: the arena there has the length that they need."""
        before = self.arena.device
        super()._apply(fn, recurse)
        if self.arena.device != before:
            self.arena = self.arena.new_empty(self._needed(self.max_tokens))
        return self

    def release(self) -> None:
        """Frees the outgrown arenas. Call it when no graph captured before the last grow() is replayed any more."""
        self._outgrown.clear()

    def extra_repr(self) -> str:
        return f"{self.nbytes} bytes, max_tokens={self.max_tokens}"

    def __getstate__(self) -> dict:
        return {**super().__getstate__(), "_outgrown": []}  # graphs are not copied, so neither is what they hold


def share_workspace(model: nn.Module | Iterable[nn.Module], max_tokens: int) -> Workspace:
    """Gives all MoELayers of a model one workspace, in the place of any that they had.

    Peak scratch memory of the model is then that of its largest layer, whether it runs eagerly, compiled or captured.

    Args:
        model: a module, or several, all on one device.
        max_tokens: the most tokens of one call.

    Raises:
        ValueError: there is no MoELayer, or they are on several devices.
    """
    from moe_ops.layer import MoELayer

    op = "share_workspace"
    roots = [model] if isinstance(model, nn.Module) else list(model)
    layers = {id(m): m for root in roots for m in root.modules() if isinstance(m, MoELayer)}.values()
    check.value(len(layers) > 0, op, "model", "one with MoELayers", "none", "Build its experts with MoELayer.")
    devices = {layer.w2.device for layer in layers}
    fix = "Call it once for the layers of each device."
    check.value(len(devices) == 1, op, "model", "on one device", sorted(map(str, devices)), fix)
    sizes, backends = [layer.sizes for layer in layers], [layer.experts.get("backend", "auto") for layer in layers]
    workspace = Workspace(sizes, max_tokens, devices.pop(), backends)
    for layer in layers:
        layer.workspace = workspace
    return workspace
