"""How a layer's experts lie in a checkpoint: one tensor per projection, or all experts stacked in one."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_ops import check
from moe_ops.checkpoints.files import Files
from moe_ops.checkpoints.quantization import Quantization
from moe_ops.prep.source import SCALE_DTYPES, VALUE_DTYPES, Source, exponents, finite, group_of, pack_of, scale_shape
from moe_ops.recipes import FLOATS
from moe_ops.rows import ceil_div


@dataclass(frozen=True)
class Reader:
    """Slices of the tensors whose names begin alike."""

    files: Files
    prefix: str

    @property
    def op(self) -> str:
        return self.files.op

    def get(self, suffix: str, *index: int | slice) -> Tensor:
        return self.files.get(self.prefix + suffix, *index)

    def name(self, suffix: str) -> str:
        """For error sentences."""
        return f"{self.prefix}{suffix} in {self.files.where[self.prefix + suffix]}"


@dataclass(frozen=True)
class Sizes:
    """E experts, K hidden, I intermediate: of the whole model."""

    E: int
    K: int
    I: int

    def of(self, part: str) -> tuple[int, int]:
        """(N, K) of one matrix of an expert."""
        return (self.K, self.I) if part == "down" else (self.I, self.K)


@dataclass(frozen=True)
class Want:
    """One tensor that must be in the checkpoint."""

    suffix: str
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]


def cuts(part: str, columns: tuple[int, int], quant: Quantization) -> tuple[tuple[slice, slice], tuple[slice, slice]]:
    """(index of the values, index of the scales) for the part of I in [first, last). The cut falls between scales."""
    first, last = columns
    rows_group, columns_group = group_of(quant.kind, quant.block)
    every = slice(None)
    if part != "down":
        return (slice(first, last), every), (slice(first // rows_group, ceil_div(last, rows_group)), every)
    pack = pack_of(quant.kind)
    if quant.kind == "fp8_channel":
        return (every, slice(first, last)), (every, every)
    scales = slice(first // columns_group, ceil_div(last, columns_group))
    return (every, slice(first // pack, ceil_div(last, pack))), (every, scales)


def source(reader: Reader, suffix: str, values: Tensor, scale: Tensor, quant: Quantization) -> Source:
    """A quantised Source with checked scales, those of the tensor `suffix`."""
    read = exponents if quant.kind in ("mxfp4", "mxfp8") else finite
    return Source(quant.kind, values, read(reader.op, reader.name(suffix), scale), quant.block)


@dataclass(frozen=True)
class PerExpert:
    """`{expert}.{projection}.weight` and its scale: gate and up (I, K), down (K, I)."""

    gate: str
    up: str
    down: str

    @property
    def probe(self) -> str:
        """A suffix that only this layout has."""
        return f"0.{self.gate}.weight"

    def wants(self, sizes: Sizes, quant: Quantization) -> Iterator[Want]:
        for expert in range(sizes.E):
            for part in ("gate", "up", "down"):
                N, K = sizes.of(part)
                stem = f"{expert}.{getattr(self, part)}"
                yield Want(f"{stem}.weight", ((N, K // pack_of(quant.kind)),), VALUE_DTYPES[quant.kind])
                if quant.kind != "float":
                    shape = scale_shape(quant.kind, N, K, quant.block)
                    also = {"fp8_tensor": ((1,),), "fp8_channel": ((N,),)}.get(quant.kind, ())
                    yield Want(f"{stem}{quant.scale}", (shape, *also), SCALE_DTYPES[quant.kind])

    def read(
        self, reader: Reader, expert: int, part: str, columns: tuple[int, int], sizes: Sizes, quant: Quantization
    ) -> Source:
        """One matrix of one expert, the part of I in [first, last)."""
        of_values, of_scales = cuts(part, columns, quant)
        stem = f"{expert}.{getattr(self, part)}"
        values = reader.get(f"{stem}.weight", *of_values)
        if quant.kind == "float":
            return Source("float", values)
        name = f"{stem}{quant.scale}"
        if quant.kind == "fp8_tensor":
            scale = reader.get(name).reshape(())
        elif quant.kind == "fp8_channel":
            scale = reader.get(name).reshape(-1, 1)[of_scales]
        else:
            scale = reader.get(name, *of_scales)
        return source(reader, name, values, scale, quant)

    def biases(self, reader: Reader, experts: range, columns: tuple[int, int], sizes: Sizes) -> dict[str, Tensor]:
        return {}


@dataclass(frozen=True)
class Stacked:
    """All experts in one tensor: gate and up together (E, 2 I, K), down (E, K, I), and biases beside them."""

    gate_up: str = "gate_up_proj"
    down: str = "down_proj"
    interleaved: bool = False
    """Gate and up rows alternate; otherwise gate rows come first."""
    transposed: bool = False
    """(E, K, 2 I) and (E, I, K)."""
    blocks: bool = False
    """MXFP4 as `_blocks` (E, N, K / 32, 16) and `_scales` (E, N, K / 32)."""
    biased: bool = False

    @property
    def probe(self) -> str:
        return self.gate_up + ("_blocks" if self.blocks else "")

    def _names(self, part: str, quant: Quantization) -> tuple[str, str]:
        stem = self.down if part == "down" else self.gate_up
        if self.blocks:
            return f"{stem}_blocks", f"{stem}_scales"
        return stem, stem + quant.scale.replace(".weight", "")

    def wants(self, sizes: Sizes, quant: Quantization) -> Iterator[Want]:
        for part in ("gate", "down"):
            N, K = sizes.of(part)
            N *= 1 if part == "down" else 2
            shape = (sizes.E, N, K // pack_of(quant.kind))
            groups = scale_shape(quant.kind, N, K, quant.block)
            if self.blocks:
                shape = (sizes.E, N, groups[-1], 16)
            elif self.transposed:
                shape = (sizes.E, K, N)
            values, scales = self._names(part, quant)
            yield Want(values, (shape,), VALUE_DTYPES[quant.kind])
            if quant.kind != "float":
                yield Want(scales, ((sizes.E, *groups),), SCALE_DTYPES[quant.kind])
            if self.biased:
                yield Want(f"{self.down if part == 'down' else self.gate_up}_bias", ((sizes.E, N),), FLOATS)

    def read(
        self, reader: Reader, expert: int, part: str, columns: tuple[int, int], sizes: Sizes, quant: Quantization
    ) -> Source:
        (rows, of_k), (scale_rows, scale_k) = cuts(part, columns, quant)
        name, scale_name = self._names(part, quant)
        step = slice(None)
        if part != "down":
            rows_group, _ = group_of(quant.kind, quant.block)
            together = "Gate and up rows share a scale there: store them apart."
            check.multiple(reader.op, "I", sizes.I, rows_group, together)
            check.value(
                not self.interleaved or rows_group == 1, reader.op, "rows of a scale", "1", rows_group, together
            )
            rows, step = self._half(rows, part, sizes.I)
            scale_rows, _ = self._half(scale_rows, part, ceil_div(sizes.I, rows_group))
        if self.transposed:
            values = reader.get(name, expert, of_k, rows).T[step]
        elif self.blocks:
            values = reader.get(name, expert, rows, scale_k)[step].flatten(1)
        else:
            values = reader.get(name, expert, rows, of_k)[step]
        if quant.kind == "float":
            return Source("float", values)
        if quant.kind == "fp8_tensor":
            scale = reader.get(scale_name)[expert]
        else:
            scale = reader.get(scale_name, expert, scale_rows, scale_k)[step]
        return source(reader, scale_name, values, scale, quant)

    def _half(self, rows: slice, part: str, I: int) -> tuple[slice, slice]:
        """Where gate's or up's rows lie, of I each: (rows to read, those of them to keep)."""
        up = int(part == "up")
        if self.interleaved:
            return slice(2 * rows.start, 2 * rows.stop), slice(up, None, 2)
        return slice(up * I + rows.start, up * I + rows.stop), slice(None)

    def biases(self, reader: Reader, experts: range, columns: tuple[int, int], sizes: Sizes) -> dict[str, Tensor]:
        """w13_bias (E, 2 i), gate first, of the columns of I asked for, and w2_bias (E, K)."""
        if not self.biased:
            return {}
        some = slice(experts.start, experts.stop)
        w13 = reader.get(f"{self.gate_up}_bias", some)
        halves = []
        for part in ("gate", "up"):
            rows, step = self._half(slice(*columns), part, sizes.I)
            halves.append(w13[:, rows][:, step])
        return {"w13_bias": torch.cat(halves, 1), "w2_bias": reader.get(f"{self.down}_bias", some).clone()}


Layout = PerExpert | Stacked
