"""How MXFP4 weights are stored: as checkpoints have them, or repacked for one card's kernels.

A format changes the codes' order and what the exponent bytes count from. Never the number of bytes, never a value:
prep/repack.py goes both ways. Scales keep their shape and strides, (E, N, K / 128) int32 MN-major, one word for the
four groups of 128 columns.
"""

from dataclasses import dataclass

import torch

from moe_ops.spec import TensorSpec

SPAN = 11
"""Powers of two that the exponents under one factor may span: e2m1 times 2^-5 to 2^6 is a normal e4m3 number."""


@dataclass(frozen=True)
class WeightFormat:
    """One row of FORMATS."""

    name: str
    factor: str
    """The weights of one row that a kernel multiplies by one float32 factor: group (32 columns), block (128) or row.
    Within it, exponents are part of the e4m3 operand. Empty: the kernel's own business."""
    arch: str
    """The card whose kernels read it; empty for any."""

    @property
    def repacked(self) -> bool:
        return bool(self.factor)

    def w_spec(self, E, N, K) -> TensorSpec:
        """The codes of (E, N, K) weights. Repacked: a 32-byte piece holds 64 columns of a row, and the pieces of
        neighbouring rows follow one another, so that what a program loads at a time is contiguous."""
        if self.repacked:
            return TensorSpec.contiguous(E, K // 64, N, 32, dtype=torch.int8)
        return TensorSpec.contiguous(E, N, K // 2, dtype=torch.int8)

    def sizes(self, w: torch.Tensor, pack: int) -> tuple[int, int, int]:
        """(E, N, K) of stored weights; pack: weights in one natural element."""
        if self.repacked:
            return w.shape[0], w.shape[2], w.shape[1] * 64
        return w.shape[0], w.shape[1], w.shape[2] * pack


FORMATS = {
    row.name: row
    for row in (
        WeightFormat("natural", "", ""),
        WeightFormat("sm90_group", "group", "sm90"),
        WeightFormat("sm90_block", "block", "sm90"),
        WeightFormat("sm90_row", "row", "sm90"),
    )
}
"""natural: low nibble = even column, exponent bytes as they are.

sm90_group: any scales. A byte holds two codes, k and k + 32 of 64 columns: one as e4m3 has its bits, one in the gaps.
sm90_block, sm90_row: eight codes of a 32-bit word are indices into a table of e4m3 magnitudes that starts at their
group's exponent. Bits 4 g to 4 g + 3 of a scale word are SPAN + exponent of group g - the largest; bits 23 to 30 are
the largest exponent itself: of the block, or of the row, which is then the same in each of the row's words.
"""
