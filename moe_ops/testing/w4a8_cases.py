"""Calls of the two GEMMs over repacked MXFP4 weights (kernels/w4a8.py) and their results in float64.

tests/interp runs them in Triton's interpreter, tests/gpu on a card.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from moe_ops.kernels.w4a8 import gated_gemm_gathered, grouped_gemm_gathered
from moe_ops.meta.grouped_gemm import BLOCKS_M, weight_scale_spec
from moe_ops.meta.pack_scale import packed_scale_spec
from moe_ops.prep.repack import repack
from moe_ops.recipes import RECIPES
from moe_ops.spec import TensorSpec
from moe_ops.testing.compare import assert_bits_equal, relative_error
from moe_ops.testing.decode import decode_rows, decode_weight
from moe_ops.testing.kernel_check import CLOSE, moved
from moe_ops.testing.poison import poisoned

MXFP4 = RECIPES["mxfp4"]
PLAIN = dict(activation="silu", swiglu_limit=None, gemm1_alpha=None, gemm1_clamp_limit=None)
SPREADS = {"sm90_row": "row", "sm90_block": "block", "sm90_group": "any"}
"""Format -> exponents that it is the first to hold."""


def random_weight(E: int, N: int, K: int, spread: str, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Natural (w, w_scale). spread: row (11 powers of two about each row's), block (11 about each block's of 128
    columns, those 40 apart), any (70 in neighbouring groups). The extremes occur."""
    codes = torch.randint(0, 256, (E, N, K // 2), dtype=torch.uint8, generator=generator).view(torch.int8)
    G = K // 32
    if spread == "any":
        exponent = torch.randint(92, 163, (E, N, G), generator=generator)
        exponent[:, :, 0], exponent[:, :, 1] = 92, 162
    else:
        exponent = torch.randint(0, 12, (E, N, G), generator=generator)
        exponent[:, :, 0], exponent[:, :, 1] = 0, 11
        base = torch.randint(109, 119, (E, N, 1), generator=generator)
        if spread == "block":
            base = base + 40 * (torch.arange(G) // 4 % 2)
        exponent = exponent + base
    scale = weight_scale_spec(E, N, K, MXFP4, "ue8m0").empty("cpu")
    scale.copy_(exponent.to(torch.uint8).view(torch.int32))
    return codes, scale


def random_rows(M: int, K: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """(M, K) e4m3 and scales of 128 columns; row 1 holds a NaN."""
    x = torch.randn(M, K, generator=generator).mul(64).clamp(-448, 448).to(torch.float8_e4m3fn)
    if M > 1:
        x.view(torch.uint8)[1, 3] = 0x7F
    exponent = torch.zeros(M, -(-K // 512) * 4, dtype=torch.uint8)
    exponent[:, : K // 128] = torch.randint(115, 127, (M, K // 128), generator=generator)
    scale = packed_scale_spec(M, K // 128, scale_format="ue8m0").empty("cpu")
    return x, scale.copy_(exponent.view(torch.int32))


def list_tiles(counts: list[int], block_m: int, spare: int) -> Tensor:
    """(3, MAXT) int32 of experts with so many rows each, one after another, and `spare` tiles without an expert."""
    tiles, start = [], 0
    for expert, count in enumerate(counts):
        tiles += [(expert, start + i, min(block_m, count - i)) for i in range(0, count, block_m)]
        start += count
    tiles += [(-1, 2**30, 2**30)] * spare
    return torch.tensor(tiles, dtype=torch.int32).T.contiguous()


@dataclass(frozen=True)
class W4A8Case:
    """Rows of several experts, ragged. `unused` rows behind them belong to no tile."""

    weight_format: str = "sm90_row"
    block_m: int = 16
    counts: tuple[int, ...] = (5, 0, 21, 1)
    K: int = 256
    N: int = 256
    """I for the gated GEMM."""
    T: int = 7
    bias: bool = False
    unused: int = 3
    formula: dict = field(default_factory=dict)

    def __str__(self) -> str:
        formula = "-".join(f"{name}{value}" for name, value in self.formula.items())
        sizes = f"m{self.block_m}-K{self.K}-N{self.N}-rows{'_'.join(map(str, self.counts))}"
        return f"{self.weight_format}-{sizes}{'-bias' * self.bias}{'-' * bool(formula)}{formula}"

    @property
    def R(self) -> int:
        return sum(self.counts) + self.unused

    def check_gated(self, device: str = "cpu", bound: float = CLOSE) -> None:
        """gated_gemm_gathered against float64, and that it wrote the rows of its tiles and nothing else."""
        generator = torch.Generator().manual_seed(1)
        w, w_scale = random_weight(len(self.counts), 2 * self.N, self.K, SPREADS[self.weight_format], generator)
        x, x_scale = random_rows(self.T, self.K, generator)
        row_token = torch.randint(0, self.T, (self.R,), dtype=torch.int32, generator=generator)
        row_token[0] = min(1, self.T - 1)  # the NaN
        bias = torch.randn(len(self.counts), 2 * self.N, generator=generator).bfloat16() if self.bias else None
        formula = PLAIN | self.formula

        packed = repack(w, w_scale)
        assert packed.weight_format == self.weight_format
        tensors = dict(x=x, x_scale=x_scale, row_token=row_token, tiles=self.tiles, bias=bias)
        tensors |= dict(w=packed.w, w_scale=packed.w_scale)
        specs = (
            TensorSpec.contiguous(self.R, self.N, dtype=torch.float8_e4m3fn),
            packed_scale_spec(self.R, self.N // 128, scale_format="ue8m0"),
        )
        options = dict(weight_format=self.weight_format, block_m=self.block_m, **formula)
        options |= dict(recipe="mxfp4", scale_format="ue8m0")
        (act, scale), memory = self._launch(gated_gemm_gathered, specs, tensors, options, device)

        got = decode_rows(act, scale, MXFP4)
        pre = decode_rows(x, x_scale, MXFP4)[row_token[: sum(self.counts)].long()]
        pre = self._multiply(pre, decode_weight(w, w_scale, MXFP4))
        if bias is not None:
            pre = pre + bias.double()[self.experts]
        want = gated(*pre.chunk(2, 1), **formula)
        assert torch.equal(got[: len(want)].isnan(), want.isnan()), f"{self}: NaN in other places"
        relative = relative_error(got[: len(want)].nan_to_num(), quantised(want).nan_to_num())
        assert relative <= bound, f"{self}: relative error {relative:.1e} above {bound}"

        G = self.N // 128
        place = scale[: len(want)].clone(memory_format=torch.contiguous_format).view(torch.uint8)
        assert (place[:, G:] == 0).all(), f"{self}: bytes past the last group"
        amax = want.unflatten(1, (-1, 128)).abs().nan_to_num().amax(2)
        exponent = torch.log2((amax / 448).clamp(min=2.0**-60)).ceil() + 127
        off = (place[:, :G].double() - exponent)[amax > 0]
        assert (off == 0).double().mean() > 0.98 and off.abs().max() <= 1, f"{self}: scales are not the rounded-up ones"
        self._untouched(specs, memory)

    def check_down(self, device: str = "cpu", slack: float = 1e-5) -> None:
        """grouped_gemm_gathered against float64: a bf16 rounding, and `slack` of the sum of absolute products."""
        generator = torch.Generator().manual_seed(2)
        w, w_scale = random_weight(len(self.counts), self.N, self.K, SPREADS[self.weight_format], generator)
        x, x_scale = random_rows(self.R, self.K, generator)
        packed = repack(w, w_scale)
        assert packed.weight_format == self.weight_format
        tensors = dict(x=x, x_scale=x_scale, tiles=self.tiles, w=packed.w, w_scale=packed.w_scale)
        specs = (TensorSpec.contiguous(self.R, self.N, dtype=torch.bfloat16),)
        options = dict(weight_format=self.weight_format, block_m=self.block_m)
        (out,), memory = self._launch(grouped_gemm_gathered, specs, tensors, options, device)

        rows, weight = decode_rows(x, x_scale, MXFP4)[: sum(self.counts)], decode_weight(w, w_scale, MXFP4)
        want, size = self._multiply(rows, weight), self._multiply(rows.abs(), weight.abs())
        got = out[: len(want)].double()
        assert torch.equal(got.isnan(), want.isnan()), f"{self}: NaN in other places"
        wrong = (got - want).abs() > want.abs() * 2.0**-8 + size * slack
        assert not wrong.any(), f"{self}: {int(wrong.sum())} of {wrong.numel()} products are off"
        self._untouched(specs, memory)

    @property
    def tiles(self) -> Tensor:
        return list_tiles(list(self.counts), self.block_m, spare=2)

    @property
    def experts(self) -> Tensor:
        return torch.arange(len(self.counts)).repeat_interleave(torch.tensor(self.counts))

    def _multiply(self, rows: Tensor, weight: Tensor) -> Tensor:
        parts = zip(rows.split(list(self.counts)), weight, strict=True)
        return torch.cat([part @ expert.T for part, expert in parts])

    def _launch(self, launcher, specs, tensors, options, device) -> tuple[list[Tensor], list[Tensor]]:
        """Twice, into memory full of one byte and of another: (results, memory), equal where they were written."""
        tensors = {name: moved(value, device) for name, value in tensors.items()}
        for pattern in (0x7E, 0xFF):
            memory = [poisoned(spec.nbytes, pattern, device) for spec in specs]
            views = [spec.carve(buffer, 0) for spec, buffer in zip(specs, memory, strict=True)]
            launcher(tuple(views), **tensors, **options)
            results = [view.cpu()[: sum(self.counts)] for view in views]
            if pattern == 0x7E:
                before = results
        for one, other in zip(before, results, strict=True):
            assert_bits_equal(one, other, f"{self}: results of two runs")
        return [view.cpu() for view in views], memory

    def _untouched(self, specs, memory) -> None:
        for spec, buffer in zip(specs, memory, strict=True):
            whole = spec.carve(buffer.cpu(), 0)
            rest = whole[sum(self.counts) :].clone(memory_format=torch.contiguous_format).view(torch.uint8)
            assert (rest == 0xFF).all(), f"{self}: rows of no tile were written"


def gated(gate: Tensor, up: Tensor, *, activation, swiglu_limit, gemm1_alpha, gemm1_clamp_limit) -> Tensor:
    """The gated activation from its definition, in float64."""
    if activation == "situ":
        a, b = gemm1_alpha, gemm1_clamp_limit
        return a * torch.tanh(gate / a) * torch.sigmoid(gate) * b * torch.tanh(up / b)
    limit = swiglu_limit if gemm1_alpha is None else gemm1_clamp_limit
    if limit is not None:
        gate, up = torch.minimum(gate, torch.tensor(limit)), up.clamp(-limit, limit)
    if gemm1_alpha is not None:
        return gate * torch.sigmoid(gemm1_alpha * gate) * (up + 1)
    return gate * torch.sigmoid(gate) * up


def quantised(act: Tensor) -> Tensor:
    """Groups of 128 columns as e4m3 with a power-of-two scale, in float64."""
    grouped = act.unflatten(1, (-1, 128))
    amax = grouped.abs().nan_to_num().amax(2, keepdim=True).clamp(min=1e-10)
    scale = torch.exp2(torch.log2(amax / 448).ceil())
    return ((grouped / scale).float().to(torch.float8_e4m3fn).double() * scale).flatten(1)


FORMULAS = (
    dict(swiglu_limit=1.5),
    dict(gemm1_alpha=1.702, gemm1_clamp_limit=2.0),
    dict(activation="situ", gemm1_alpha=3.0, gemm1_clamp_limit=2.0),
)
"""Of the activation, beside PLAIN."""
CASES = [W4A8Case(name, m, counts=(5, 0, m + 5, 1), N=256 if m == 16 else 128) for name in SPREADS for m in BLOCKS_M]
CASES += [W4A8Case(counts=(0, 3), bias=True, formula=formula) for formula in FORMULAS]
CASES += [
    W4A8Case("sm90_group", K=640, N=640, counts=(0, 3), bias=True),  # a second word of scales, on both sides
    W4A8Case("sm90_row", K=128, N=128, counts=(1,), T=1, unused=0),
    W4A8Case("sm90_block", K=640, N=384, counts=(2, 17)),
]
LARGE = [
    W4A8Case(name, m, counts=(m, 0, 1, 2 * m, m - 3, 7, 3 * m + 2) * copies, K=K, N=N, T=40, bias=True)
    for name in SPREADS
    for m in BLOCKS_M
    for K, N, copies in ((2048, 768, 1), (1536, 2048, 8))  # few programs and many
]
"""For a card."""
