"""Comparisons whose failures say where and by how much."""

import torch
from torch import Tensor


def relative_error(got: Tensor, want: Tensor) -> float:
    """Frobenius norm of the difference over that of `want`, in float64. A NaN gives NaN, which passes no test."""
    got, want = got.double(), want.double()
    if want.numel() == 0:
        return 0.0
    difference = (got - want).norm()
    return float(difference if want.norm() == 0 else difference / want.norm())


def assert_bits_equal(got: Tensor, want: Tensor, name: str = "result") -> None:
    """Same shape, dtype and bytes; names the first element that differs."""
    assert got.shape == want.shape and got.dtype == want.dtype, (
        f"{name}: {tuple(got.shape)} {got.dtype} instead of {tuple(want.shape)} {want.dtype}"
    )
    a, b = (_bytes(t) for t in (got, want))
    wrong = (a != b).any(1)
    if wrong.any():
        first = int(wrong.nonzero()[0])
        index = tuple(int(i) for i in torch.unravel_index(torch.tensor(first), got.shape))
        values = f"{got[index].float().item()} instead of {want[index].float().item()}"
        raise AssertionError(f"{name}: {int(wrong.sum())} of {got.numel()} elements differ, first {index}: {values}")


def _bytes(tensor: Tensor) -> Tensor:
    """(elements, bytes of one). A copy, because axes of size 1 may have strides that no view to bytes accepts."""
    flat = tensor.clone(memory_format=torch.contiguous_format).flatten()
    return flat.view(torch.uint8).view(tensor.numel(), tensor.dtype.itemsize)
