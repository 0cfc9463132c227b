"""How a MoELayer moves, casts and is saved: prepared weights are bits that no cast may touch."""

import torch
from torch import Tensor, nn

from moe_ops import capture, check

_ROUTER = ("router_weight", "router_bias")


class LayerState(nn.Module):
    """The part of MoELayer that nn.Module calls for `.to()` and state dicts."""

    w2: Tensor
    prepared_for: str
    """Recipe and formats of the weights; a state dict holds it and loads into a layer of the same alone."""

    def _apply(self, fn, recurse=True):
        """Moves everything; casts the router linear alone, because fp8 values and scales are floats to `.half()`. What
        comes to a card can be captured."""
        before = {name: t for name, t in self.named_buffers(recurse=False) if name not in _ROUTER}
        super()._apply(fn, recurse)
        for name, tensor in before.items():
            moved = getattr(self, name)
            if moved.dtype != tensor.dtype:
                setattr(self, name, tensor.to(moved.device))
        capture.prepare(self.w2.device)
        return self

    def get_extra_state(self) -> Tensor:
        """What the weights were prepared for, as bytes in a tensor: safetensors stores nothing else."""
        return torch.tensor(list(self.prepared_for.encode()), dtype=torch.uint8, device="cpu")

    def set_extra_state(self, state: Tensor) -> None:
        got = bytes(state.tolist()).decode()
        if got != self.prepared_for:
            fix = "Build the layer from weights prepared alike."
            raise ValueError(check.sentence("MoELayer", "state_dict", f"of {self.prepared_for} weights", got, fix))

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for key, tensor in self._packed_scales(destination, prefix):
            destination[key] = tensor.mT

    def _load_from_state_dict(self, state_dict, prefix, *args, **kwargs):
        for key, tensor in self._packed_scales(state_dict, prefix):
            state_dict[key] = tensor.mT
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def _packed_scales(self, state: dict, prefix: str) -> list[tuple[str, Tensor]]:
        """int32 scales: (E, N, words) MN-major here, (E, words, N) contiguous in a state dict (4 divides N)."""
        keys = [f"{prefix}{name}" for name in ("w13_scale", "w2_scale")]
        return [(key, state[key]) for key in keys if key in state and state[key].dtype == torch.int32]
