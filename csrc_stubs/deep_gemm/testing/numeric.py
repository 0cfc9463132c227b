"""Distances between results."""

import torch


def calc_diff(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor | float:
    """1 - 2 x.y / (x.x + y.y) in float64: 0 for equal tensors or two zeros, 2 for opposite ones."""
    x, y = x.double(), y.double()
    energy = (x * x + y * y).sum()
    return 0.0 if energy == 0 else 1 - 2 * (x * y).sum() / energy


def count_bytes(*tensors: object) -> int:
    """Bytes of all tensors, tuples and lists entered, None skipped."""
    total = 0
    for entry in tensors:
        if isinstance(entry, (tuple, list)):
            total += count_bytes(*entry)
        elif isinstance(entry, torch.Tensor):
            total += entry.numel() * entry.element_size()
    return total


def assert_bitwise_equal(x: torch.Tensor, y: torch.Tensor, label: str = "") -> None:
    """AssertionError naming the first element whose bytes differ; NaNs compare by their bits."""
    where = f" of {label}" if label else ""
    if x.shape != y.shape or x.dtype != y.dtype:
        kinds = [f"{t.dtype} {tuple(t.shape)}" for t in (x, y)]
        raise AssertionError(f"bitwise mismatch{where}: {kinds[0]} against {kinds[1]}")
    x, y = x.contiguous().flatten(), y.contiguous().flatten()
    differ = x.view(torch.uint8).ne(y.view(torch.uint8)).unflatten(0, (-1, x.element_size())).any(1)
    if differ.any():
        index = int(differ.nonzero()[0])
        raise AssertionError(
            f"bitwise mismatch{where}: {int(differ.sum())} of {differ.numel()} elements, first at "
            f"{index} of the flattened tensor: {x[index].item()} against {y[index].item()}"
        )
