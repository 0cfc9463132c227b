"""TensorSpec: how a contract describes a tensor before it exists."""

from dataclasses import dataclass

import torch

from moe_ops.rows import align

ALIGNMENT = 256
"""Bytes. Every buffer of a workspace starts on a multiple of it (TMA needs 16, a DRAM burst likes more)."""


@dataclass(frozen=True)
class TensorSpec:
    """Shape, dtype, strides and storage size (elements, padding included) of one tensor. Sizes may be symbolic."""

    shape: tuple
    dtype: torch.dtype
    stride: tuple
    storage: int

    @classmethod
    def contiguous(cls, *shape, dtype: torch.dtype) -> "TensorSpec":
        stride, numel = [], 1
        for size in reversed(shape):
            stride.append(numel)
            numel = numel * size
        return cls(shape, dtype, tuple(reversed(stride)), numel)

    @classmethod
    def mn_major(cls, *shape, dtype: torch.dtype) -> "TensorSpec":
        """(..., MN, G) with MN the fast axis, padded to 16 bytes: the scale layout that TMA reads."""
        *batch, mn, groups = shape
        column = align(mn, 16 // dtype.itemsize)
        stride, numel = [column, 1], column * groups
        for size in reversed(batch):
            stride.append(numel)
            numel = numel * size
        return cls(shape, dtype, tuple(reversed(stride)), numel)

    @property
    def nbytes(self):
        return self.storage * self.dtype.itemsize

    def empty(self, device) -> torch.Tensor:
        return self._shaped(torch.empty(self.storage, dtype=self.dtype, device=device))

    def zeros(self, device) -> torch.Tensor:
        return self._shaped(torch.zeros(self.storage, dtype=self.dtype, device=device))

    def restride(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor with the spec's strides where only axes of size 1 differ: a copy through a file or another device
        resets those, and TMA descriptors are made from them."""
        return tensor if tensor.stride() == self.stride else tensor.as_strided(self.shape, self.stride)

    def carve(self, ws: torch.Tensor, offset: int) -> torch.Tensor:
        """The tensor at byte `offset` of the flat uint8 tensor `ws`."""
        return self._shaped(ws[offset : offset + self.nbytes].view(self.dtype))

    def _shaped(self, flat: torch.Tensor) -> torch.Tensor:
        return flat.as_strided(self.shape, self.stride)


def pack(specs: tuple[TensorSpec, ...]) -> tuple[tuple, int]:
    """Offsets of tensors laid one after another, and the bytes they take together."""
    offsets, end = [], 0
    for spec in specs:
        offsets.append(end)
        end = end + align(spec.nbytes, ALIGNMENT)
    return tuple(offsets), end
