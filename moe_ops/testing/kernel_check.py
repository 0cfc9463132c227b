"""Runs one op's Triton kernel on poisoned results and compares it with the CPU reference, padding included.

tests/interp calls it with CPU tensors, tests/gpu with the same cases on a card.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from moe_ops.ops.grouped_gemm import CONTIGUOUS as GEMM_CONTIGUOUS
from moe_ops.ops.grouped_gemm import MASKED as GEMM_MASKED
from moe_ops.ops.pack_scale import PACK_SCALE
from moe_ops.ops.post_permute import POST_PERMUTE
from moe_ops.ops.pre_permute import CONTIGUOUS as PRE_CONTIGUOUS
from moe_ops.ops.pre_permute import MASKED as PRE_MASKED
from moe_ops.ops.quantize import QUANTIZE
from moe_ops.ops.silu_and_quant import CONTIGUOUS as ACT_CONTIGUOUS
from moe_ops.ops.silu_and_quant import MASKED as ACT_MASKED
from moe_ops.ops.topk import TOPK
from moe_ops.recipes import RECIPES
from moe_ops.rows import BLOCK
from moe_ops.testing.compare import assert_bits_equal, relative_error
from moe_ops.testing.decode import decode_rows
from moe_ops.testing.poison import poisoned

_ALL = (GEMM_CONTIGUOUS, GEMM_MASKED, PACK_SCALE, POST_PERMUTE, PRE_CONTIGUOUS, PRE_MASKED, QUANTIZE, ACT_CONTIGUOUS)
OPS = {op.name: op for op in (*_ALL, ACT_MASKED, TOPK)}

CLOSE = 2e-3
"""Relative error (Frobenius) of products and activations: a card sums in another order and its exp is approximate, so
some results round to the neighbouring bf16 or e4m3 value. Routing, quantisation and sums are compared bit by bit."""
CLOSE_WEIGHTS = 1e-5
"""Of router weights, which are float32."""


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
    """An op's results and the memory they lie in, which held nothing but `pattern` before."""

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
    memory = tuple(poisoned(spec.nbytes, pattern, device) for spec in specs)
    views = tuple(spec.carve(buffer, 0) for spec, buffer in zip(specs, memory, strict=True))
    OPS[op].into(views, backend=backend, **arguments)
    return Results(views, memory, pattern)


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
            same = (one == other).cpu() | ~own
            assert same.all(), f"{case}: result {index} differs between two runs"


def compare(case: KernelCase, arguments: dict, got: Results, want: Results, owned: list[Tensor]) -> None:
    """Values, exact or close by op, and that no byte was written which the reference leaves alone."""
    _COMPARE.get(case.op, _compare_bits)(case, arguments, [view.cpu() for view in got.views], want.views)
    if case.op != "grouped_gemm_contiguous":  # whole blocks are allowed there
        for index, (memory, own) in enumerate(zip(got.memory, owned, strict=True)):
            assert (memory.cpu()[~own] == got.pattern).all(), f"{case}: result {index}: padding was written"


def _compare_bits(case, arguments, got, want) -> None:
    for index, (one, other) in enumerate(zip(got, want, strict=True)):
        if one.is_floating_point() and one.dtype.itemsize > 1:  # a NaN that was cast has other bits on a card
            one = torch.where(one.isnan() & other.isnan(), other, one)
        assert_bits_equal(one, other, f"{case}: result {index}")


def _close(case: KernelCase, got: Tensor, want: Tensor, bound: float = CLOSE) -> None:
    """NaN where the reference has it, and close elsewhere."""
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


_COMPARE = {
    "topk": _compare_topk,
    "silu_and_quant_contiguous": _compare_rows(_labelled),
    "silu_and_quant_masked": _compare_rows(_counted),
    "grouped_gemm_contiguous": _compare_rows(_labelled),
    "grouped_gemm_masked": _compare_rows(_counted),
}
