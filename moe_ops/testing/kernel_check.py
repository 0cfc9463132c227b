"""Runs one op's Triton kernel on poisoned results and compares it with the CPU reference, padding included.

tests/interp calls it with CPU tensors, tests/gpu with the same cases on a card.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from moe_ops.ops.gated_gemm import DIRECT as GATED_DIRECT
from moe_ops.ops.gated_gemm import GATHERED as GATED_GATHERED
from moe_ops.ops.gemm_nt_bf16_fp32 import GEMM_NT_BF16_FP32
from moe_ops.ops.gemm_nt_fp8 import GEMM_NT_FP8
from moe_ops.ops.gemm_nt_mxfp8 import GEMM_NT_MXFP8
from moe_ops.ops.grouped_gemm import CONTIGUOUS as GEMM_CONTIGUOUS
from moe_ops.ops.grouped_gemm import DIRECT as GEMM_DIRECT
from moe_ops.ops.grouped_gemm import GATHERED as GEMM_GATHERED
from moe_ops.ops.grouped_gemm import MASKED as GEMM_MASKED
from moe_ops.ops.hc_prenorm_gemm import HC_PRENORM_GEMM
from moe_ops.ops.pack_scale import PACK_SCALE
from moe_ops.ops.post_permute import POST_PERMUTE
from moe_ops.ops.pre_permute import CONTIGUOUS as PRE_CONTIGUOUS
from moe_ops.ops.pre_permute import GATHERED as PRE_GATHERED
from moe_ops.ops.pre_permute import MASKED as PRE_MASKED
from moe_ops.ops.quantize import QUANTIZE
from moe_ops.ops.silu_and_quant import CONTIGUOUS as ACT_CONTIGUOUS
from moe_ops.ops.silu_and_quant import MASKED as ACT_MASKED
from moe_ops.ops.topk import TOPK
from moe_ops.recipes import RECIPES
from moe_ops.rows import BLOCK
from moe_ops.testing.compare import assert_bits_equal, relative_error
from moe_ops.testing.decode import decode_rows
from moe_ops.testing.fused_check import direct_act, gathered_act, routes_here, tiled_rows
from moe_ops.testing.poison import poisoned

_ALL = (GEMM_CONTIGUOUS, GEMM_MASKED, PACK_SCALE, POST_PERMUTE, PRE_CONTIGUOUS, PRE_MASKED, QUANTIZE, ACT_CONTIGUOUS)
_DENSE = (GEMM_NT_BF16_FP32, GEMM_NT_FP8, GEMM_NT_MXFP8, HC_PRENORM_GEMM)
_FUSED = (PRE_GATHERED, GATED_GATHERED, GATED_DIRECT, GEMM_GATHERED, GEMM_DIRECT)
OPS = {op.name: op for op in (*_ALL, ACT_MASKED, TOPK, *_DENSE, *_FUSED)}

CLOSE = 2e-3
"""Relative error (Frobenius) of products and activations: a card sums in another order and its exp is approximate, so
some results round to the neighbouring bf16 or e4m3 value. Routing, quantisation and sums are compared bit by bit."""
GATED = 1e-2
"""Of quantised activations on a card, whose tensor core cuts off bits of fp8 sums: a code that flips is 6 % of it."""
CLOSE_WEIGHTS = 1e-5
"""Of router weights, which are float32."""
GUARD = 256
"""Bytes on either side of each result, which nobody may write."""
CLOSE_SUMS = 5e-5
"""Of products that stay float32: a tensor core cuts off bits as it adds, and hc_prenorm_gemm keeps 16 bits of fn."""


@dataclass(frozen=True)
class KernelCase:
    """One call of one op. `build()` returns its arguments, backend aside, on the CPU."""

    op: str
    name: str
    build: Callable[[], dict] = field(repr=False)

    def __str__(self) -> str:
        return f"{self.op}-{self.name}"


@dataclass(frozen=True)
class Results:
    """An op's results and the memory they lie in, scratch behind them, which held nothing but `pattern` before."""

    views: tuple[Tensor, ...]
    memory: tuple[Tensor, ...]
    pattern: int


def moved(value, device):
    """A tensor on another device, strides included: Tensor.to() would make an MN-major scale contiguous."""
    if not isinstance(value, Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device).copy_(value)


def run(op: str, arguments: dict, backend: str, pattern: int = 0xFF) -> Results:
    """Computes into memory full of one byte."""
    device = next(value.device for value in arguments.values() if isinstance(value, Tensor))
    specs = OPS[op].contract(backend=backend, **arguments)
    memory = tuple(poisoned(spec.nbytes + 2 * GUARD, pattern, device) for spec in specs)
    views = tuple(spec.carve(buffer, GUARD) for spec, buffer in zip(specs, memory, strict=True))
    OPS[op].into(views, backend=backend, **arguments)
    return Results(views[: _shown(op, len(specs))], memory, pattern)


def _shown(op: str, results: int) -> int:
    """Results that mean something: not the scratch of a kernel, but `ends`, which a GEMM may read."""
    return results - OPS[op].scratch + (op == "pre_permute_contiguous")


def check_kernel(case: KernelCase, device: str = "cpu", backend: str = "triton") -> None:
    """Asserts that the kernel gives the reference's results and writes nothing else."""
    arguments = case.build()
    want, zeroed = (run(case.op, arguments, "reference", pattern) for pattern in (0xFF, 0x00))
    owned = [one == other for one, other in zip(want.memory, zeroed.memory, strict=True)]
    on_device = {name: moved(value, device) for name, value in arguments.items()}
    got = run(case.op, on_device, backend)
    compare(case, arguments, got, want, owned)
    if torch.device(device).type == "cuda":
        again = run(case.op, on_device, backend, 0x7F)
        for index, (one, other, own) in enumerate(zip(got.memory, again.memory, owned, strict=True)):
            if index >= len(got.views):
                break  # scratch
            same = (one == other).cpu() | ~own
            assert same.all(), f"{case}: result {index} differs between two runs"


def compare(case: KernelCase, arguments: dict, got: Results, want: Results, owned: list[Tensor]) -> None:
    """Values, exact or close by op, and that no byte was written which the reference leaves alone."""
    views = [view.cpu() for view in got.views]
    if case.op == "gated_gemm_gathered":
        quantised_on_card = got.memory[0].is_cuda and RECIPES[arguments["recipe"]].quantised
        _compare_gated_gathered(case, arguments, views, GATED if quantised_on_card else CLOSE)
    else:
        _COMPARE.get(case.op, _compare_bits)(case, arguments, views, want.views)
    for index, (memory, own) in enumerate(zip(got.memory, owned, strict=True)):
        rest = memory.cpu()[~own] == got.pattern
        if case.op == "grouped_gemm_contiguous" or index >= len(got.views):  # whole blocks, and scratch
            rest = torch.cat((memory[:GUARD], memory[-GUARD:])).cpu() == got.pattern
        assert rest.all(), f"{case}: result {index}: what is not its own was written"


def _compare_bits(case, arguments, got, want) -> None:
    for index, (one, other) in enumerate(zip(got, want, strict=True)):
        if one.is_floating_point() and one.dtype.itemsize > 1:  # a NaN that was cast has other bits on a card
            one = torch.where(one.isnan() & other.isnan(), other, one)
        assert_bits_equal(one, other, f"{case}: result {index}")


def _close(case: KernelCase, got: Tensor, want: Tensor, bound: float = CLOSE) -> None:
    """NaN where the reference has it, and close elsewhere. A few values may differ by a step of bf16: the bound is for
    the norm of many."""
    bound = max(bound, 2**-7) if got.numel() < 16 and got.dtype == torch.bfloat16 else bound
    assert torch.equal(got.isnan(), want.isnan()), f"{case}: NaN in other places"
    error = relative_error(got.double().nan_to_num(), want.double().nan_to_num())
    assert error <= bound, f"{case}: relative error {error:.2e} above {bound}"


def _compare_topk(case, arguments, got, want) -> None:
    assert_bits_equal(got[1], want[1], f"{case}: topk_ids")
    _close(case, got[0], want[0], CLOSE_WEIGHTS)


def _compare_rows(rows: Callable[[dict], Tensor]) -> Callable:
    def compare_rows(case, arguments, got, want) -> None:
        recipe, live = RECIPES[arguments["recipe"]], rows(arguments)
        if case.op.startswith("silu"):
            scales = (got[1], want[1]) if recipe.quantised else (None, None)
            one, other = (
                decode_rows(value, scale, recipe) for value, scale in zip((got[0], want[0]), scales, strict=True)
            )
            _close(case, one[live], other[live])
        else:
            _close(case, got[0][live], want[0][live])
            if case.op == "grouped_gemm_contiguous":
                skipped = (arguments["m_indices"].view(-1, BLOCK)[:, 0] < 0).repeat_interleave(BLOCK)
                assert_bits_equal(got[0][skipped], want[0][skipped], f"{case}: blocks without an expert")

    return compare_rows


def _labelled(arguments: dict) -> Tensor:
    return arguments["m_indices"] >= 0


def _counted(arguments: dict) -> Tensor:
    slabs = arguments["x"] if "x" in arguments else arguments["gateup"]
    return torch.arange(slabs.shape[1]) < arguments["masked_m"][:, None]


def _compare_all(bound: float) -> Callable:
    def compare_all(case, arguments, got, want) -> None:
        for one, other in zip(got, want, strict=True):
            _close(case, one, other, bound)

    return compare_all


def _compare_gated_gathered(case, arguments, got, bound: float) -> None:
    recipe, (act, live) = RECIPES[arguments["recipe"]], gathered_act(arguments)
    rows = decode_rows(got[0], got[1] if recipe.quantised else None, recipe)
    _close(case, rows[live], act[live], bound)
    if arguments["scale_format"] == "ue8m0":
        behind = (
            got[1]
            .clone(memory_format=torch.contiguous_format)
            .view(torch.uint8)[live, act.shape[1] // recipe.x_group :]
        )
        assert (behind == 0).all(), f"{case}: bytes past the last group"


def _compare_gated_direct(case, arguments, got, want) -> None:
    act, live = direct_act(arguments)
    _close(case, got[0][live], act[live])
    assert_bits_equal(got[1], want[1], f"{case}: src2dst")


_COMPARE = {
    "topk": _compare_topk,
    "silu_and_quant_contiguous": _compare_rows(_labelled),
    "silu_and_quant_masked": _compare_rows(_counted),
    "grouped_gemm_contiguous": _compare_rows(_labelled),
    "grouped_gemm_masked": _compare_rows(_counted),
    "gated_gemm_direct": _compare_gated_direct,
    "grouped_gemm_gathered": _compare_rows(tiled_rows),
    "grouped_gemm_direct": _compare_rows(routes_here),
    "gemm_nt_fp8": _compare_all(CLOSE),
    "gemm_nt_mxfp8": _compare_all(CLOSE),
    "gemm_nt_bf16_fp32": _compare_all(CLOSE_SUMS),
    "hc_prenorm_gemm": _compare_all(CLOSE_SUMS),
}
