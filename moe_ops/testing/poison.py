"""Poisoned memory: what nobody wrote must not be read, and these bytes show it."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

PATTERNS = (0xFF, 0x7F, 0x00)
"""0xFF: NaN in fp32, bf16 and e4m3, -1 in integers. 0x7F: NaN in e4m3, huge numbers elsewhere. 0x00: looks innocent."""


def poisoned(nbytes: int, pattern: int = 0xFF, device: str | torch.device = "cpu") -> Tensor:
    """A workspace full of one byte."""
    return torch.full((nbytes,), pattern, dtype=torch.uint8, device=device)


@contextmanager
def poisoned_memory(pattern: int = 0xFF) -> Iterator[None]:
    """Within, torch.empty and its kin return memory full of `pattern` (eager Python callers; not compiled code)."""
    names = ("empty", "empty_strided", "empty_like")
    kept = {name: getattr(torch, name) for name in names}
    method = Tensor.new_empty

    def fill(function):
        def wrapper(*args, **kwargs):
            tensor = function(*args, **kwargs)
            real = type(tensor) is Tensor and tensor.device.type != "meta" and not torch.compiler.is_compiling()
            if real and tensor.untyped_storage().nbytes():
                bytes_ = torch.tensor([], dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
                bytes_.fill_(pattern)
            return tensor

        return wrapper

    try:
        for name, function in kept.items():
            setattr(torch, name, fill(function))
        Tensor.new_empty = fill(method)  # type: ignore[method-assign]
        yield
    finally:
        for name, function in kept.items():
            setattr(torch, name, function)
        Tensor.new_empty = method  # type: ignore[method-assign]
