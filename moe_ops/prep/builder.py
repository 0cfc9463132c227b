"""Builder: allocates a layer's prepared experts and fills them one matrix at a time.

At any time it holds the prepared layer and the working copies of a few rows, so a checkpoint larger than memory loads.
"""

import math
import warnings

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_ops import check
from moe_ops.meta.grouped_gemm import weight_scale_spec
from moe_ops.prep.converted import Converted
from moe_ops.prep.decide import Path
from moe_ops.prep.report import Padding, PrepReport
from moe_ops.prep.source import Source, group_of
from moe_ops.prep.weights import MoEWeights
from moe_ops.recipes import get_recipe
from moe_ops.reference.pack_scale import pack_scale
from moe_ops.rows import align, ceil_div
from moe_ops.spec import TensorSpec

PARTS = ("gate", "up", "down")
ON_INEXACT = ("raise", "warn")

_STRIP = {False: 1 << 20, True: 1 << 26}  # values converted at a time, on a CPU to stay in its cache, on a GPU


class Builder:
    """One layer in the making: `put` each part of each expert, then `finish`.

    Args:
        path: a row of prep.decide.
        E, I, K: experts, intermediate and hidden size, as the source has them (of this rank).
        padded_I: the size that I is padded to; None: the next multiple of the recipe's granule.
        device: of the result. Preparation computes there.
        on_inexact: raise or warn, where a tile of MXFP4 would lose bits as fp8.
    """

    def __init__(
        self,
        op: str,
        path: Path,
        *,
        E: int,
        I: int,
        K: int,
        padded_I: int | None = None,
        device: torch.device,
        on_inexact: str = "raise",
    ):
        check.one_of(op, "on_inexact", on_inexact, ON_INEXACT)
        self.op, self.path, self.recipe, self.on_inexact = op, path, get_recipe(op, path.recipe), on_inexact
        self.sizes = {"gate": (I, K), "up": (I, K), "down": (K, I)}
        self.K, self.I = align(K, self.recipe.granule), align(padded_I or I, self.recipe.granule)
        self.padding = Padding(self.K - K, self.I - I)
        self.w13, self.w13_scale = self._allocate(E, 2 * self.I, self.K, device)
        self.w2, self.w2_scale = self._allocate(E, self.K, self.I, device)
        self._bytes_in = self._inexact = self._tiles = 0
        self._error = self._norm = 0.0

    def _allocate(self, E: int, N: int, K: int, device: torch.device) -> tuple[Tensor, Tensor | None]:
        values = TensorSpec.contiguous(E, N, K // self.recipe.w_pack, dtype=self.recipe.w_dtype).empty(device)
        if not self.recipe.quantised:
            return values, None
        return values, weight_scale_spec(E, N, K, self.recipe, self.path.scale_format).zeros(device)

    def put(self, expert: int, part: str, source: Source) -> None:
        """Prepares one matrix: gate or up (I, K), or down (K, I), of a local expert."""
        got, want = source.shape, self.sizes[part]
        check.value(got == want, self.op, f"{part} of expert {expert}", f"of shape {want}", got, "Check the source.")
        self._bytes_in += source.nbytes
        w, scale = self._home(expert, part)
        N, K = (self.K, self.I) if part == "down" else (self.I, self.K)
        inexact = tiles = 0
        for first in range(0, N, self._strip(source, K)):
            last = min(first + self._strip(source, K), N)
            strip = source.rows(min(first, want[0]), min(last, want[0])).to(w.device).padded(last - first, K)
            if source.kind == "float":  # e2m1 has no NaN to show it later
                fine = bool(strip.values.isfinite().all())
                name = f"{part} of expert {expert}"
                check.value(fine, self.op, name, "finite", "NaN or infinity", "Check the checkpoint.")
            converted = self.path.convert(strip, self.recipe, self.path.scale_format)
            w[first:last].copy_(converted.values)
            self._store(scale, converted, first, last)
            self._measure(strip, converted)
            inexact, tiles = inexact + converted.inexact_tiles, tiles + converted.tiles
        self._inexact, self._tiles = self._inexact + inexact, self._tiles + tiles
        if inexact and self.on_inexact == "raise":
            got = f"{inexact} of {tiles} tiles that round in {part} of expert {expert}"
            fix = "Pass on_inexact='warn' to take the loss, or recipe='mxfp4' to keep the weights as they are."
            check.value(False, self.op, "the weights", "exact as fp8 in 128 x 128 tiles", got, fix)

    def _strip(self, source: Source, K: int) -> int:
        """Rows that are converted together: a whole number of blocks, few enough to bound the working copies."""
        rows, _ = group_of(source.kind, source.block)
        granule = math.lcm(max(self.recipe.w_block[0], 1), rows)
        return max(_STRIP[self.w13.device.type == "cuda"] // (granule * K), 1) * granule

    def _home(self, expert: int, part: str) -> tuple[Tensor, Tensor | None]:
        """Where this part's values and scales lie in the layer."""
        w, scale = (self.w2, self.w2_scale) if part == "down" else (self.w13, self.w13_scale)
        if part == "down":
            return w[expert], None if scale is None else scale[expert]
        half = 1 if part == "up" else 0
        return w[expert].chunk(2)[half], None if scale is None else scale[expert].chunk(2)[half]

    def _store(self, out: Tensor | None, converted: Converted, first: int, last: int) -> None:
        """The scales of rows [first, last)."""
        if out is None or converted.scale is None:
            return
        rows = self.recipe.w_block[0]
        if self.path.scale_format == "fp32":
            out[first // rows : ceil_div(last, rows)] = converted.scale
            return
        arguments = dict(mn=last - first, rows_per_scale=rows, scale_format="ue8m0")
        pack_scale((out[first:last],), scale=converted.scale, **arguments)

    def _measure(self, source: Source, converted: Converted) -> None:
        # Where every matrix of the layer is exact there is nothing to measure, and decoding takes most of the time.
        if converted.exact and (not self.path.mixed or self.on_inexact == "raise" and converted.tiles):
            return
        before = source.float()
        self._norm += float(before.double().square().sum())
        if not converted.exact:
            self._error += float((converted.float(self.recipe) - before).double().square().sum())

    def finish(self, w13_bias: Tensor | None = None, w2_bias: Tensor | None = None) -> MoEWeights:
        """The layer, checked. Biases (E, 2 I) and (E, K) float, in the source's sizes."""
        scales = [scale for scale in (self.w13_scale, self.w2_scale) if scale is not None]
        report = PrepReport(
            path=self.path.name,
            source=self.path.source,
            recipe=self.path.recipe,
            scale_format=self.path.scale_format,
            bytes_in=self._bytes_in,
            bytes_out=sum(tensor.nbytes for tensor in (self.w13, self.w2, *scales)),
            relative_error=(self._error / self._norm) ** 0.5 if self._norm else 0.0,
            inexact_tiles=self._inexact,
            tiles=self._tiles,
            padding=self.padding,
        )
        if self._inexact:
            warnings.warn(f"{self.op}: {report}", stacklevel=3)
        return MoEWeights(
            self.w13,
            self.w13_scale,
            self.w2,
            self.w2_scale,
            self.path.recipe,
            self.path.scale_format,
            self._bias("w13_bias", w13_bias),
            self._bias("w2_bias", w2_bias),
            self.padding,
            report,
        )

    def _bias(self, name: str, bias: Tensor | None) -> Tensor | None:
        if bias is None:
            return None
        K, I = self.sizes["down"]
        columns = K if name == "w2_bias" else 2 * I
        check.shape(self.op, name, bias, (self.w13.shape[0], columns), "(E, columns)", "One row an expert.")
        bias = bias.to(self.w13.device)
        if name == "w2_bias":
            return F.pad(bias, (0, self.padding.K))
        return F.pad(bias.unflatten(1, (2, I)), (0, self.padding.I)).flatten(1)
