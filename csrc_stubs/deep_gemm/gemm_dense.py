"""Dense GEMMs: d = [c +] a @ b.T, in the four orders of operands."""

import torch

from . import _check
from ._arch import arch_major
from ._check import require, short, sizes
from ._matrix import (
    Matrix,
    check_bf16,
    check_k_major,
    check_kernel,
    check_quantised,
    check_same_k,
    read_matrix,
)
from .scales import Quantised, Recipe, RecipePair, split_pair, with_scales

_RESULTS = [torch.bfloat16, torch.float32]


def _finished_early(op: str, a: Matrix, b: Matrix, d: torch.Tensor, c: torch.Tensor | None) -> bool:
    """Whether there is nothing to multiply. Checks c on the way."""
    if a.mn == 0 or b.mn == 0:
        return True
    if c is not None:
        if c.data_ptr() == d.data_ptr():
            ok = c.shape == d.shape and c.stride() == d.stride()
            got = f"shape {sizes(c.shape)}, strides {sizes(c.stride())}"
            rule = "of d's shape and strides when it shares d's memory"
            require(ok, op, "c", rule, got, "Pass d itself, or a copy.")
        _check.row_major(op, "c", c)
        _check.dtype(op, "c", c, [d.dtype], "Convert it to d's dtype.")
    if a.k == 0:
        d.copy_(c) if c is not None else d.zero_()
        return True
    return False


def _write(a: Matrix, b: Matrix, d: torch.Tensor, c: torch.Tensor | None, alpha: float | None):
    product = a.dequantise() @ b.dequantise().mT
    if alpha is not None:
        product = alpha * product
    d.copy_(product if c is None else product + c)


def _check_alpha(op: str, alpha: float | None) -> None:
    ok = alpha is None or arch_major() == 10
    rule, got = "None except on sm100", f"{alpha} on sm{arch_major()}0"
    fix = "Multiply the result, or fold it into a scale."
    require(ok, op, "alpha", rule, got, fix, NotImplementedError)


def fp8_fp4_gemm_nt(
    a: Quantised,
    b: Quantised,
    d: torch.Tensor,
    c: torch.Tensor | None = None,
    recipe: Recipe | None = None,
    recipe_a: RecipePair | None = None,
    recipe_b: RecipePair | None = None,
    compiled_dims: str = "",
    disable_ue8m0_cast: bool = False,
    alpha: float | None = None,
) -> None:
    """d = [c +] [alpha *] a @ b.T.

    Args:
        a: (m, k) e4m3, or (m, k / 2) int8 on sm100 and sm120; and its scale.
        b: (n, k) likewise; and its scale.
        d: (m, n) bf16 or fp32, row-major; written.
        c: (m, n), dtype of d; may be d itself.
        recipe, recipe_a, recipe_b: see scales.py. None: by the dtype of b's scale.
        compiled_dims: which sizes the kernel bakes in; no effect here.
        disable_ue8m0_cast: only False has kernels on sm100 and sm120.
        alpha: only on sm100.

    Raises:
        ValueError, TypeError: shape, strides, scales; dtype, device.
        NotImplementedError: a dtype, recipe or option this card has no kernel for.
    """
    op = "fp8_fp4_gemm_nt"
    (a_values, a_scale), (b_values, b_scale) = split_pair(op, "a", a), split_pair(op, "b", b)
    _check.same_device(op, a=a_values, a_scale=a_scale, b=b_values, b_scale=b_scale, d=d, c=c)
    left = read_matrix(op, "a", a_values, 2, "(m, k)")
    right = read_matrix(op, "b", b_values, 2, "(n, k)")
    check_quantised(op, a=left, b=right)
    if arch_major() == 9:
        check_k_major(op, a=left, b=right)
    check_same_k(op, left, right)
    _check.output(op, d, (left.mn, right.mn), "(m, n)", _RESULTS)
    _check_alpha(op, alpha)
    if _finished_early(op, left, right, d, c):
        return
    left, right = with_scales(
        op,
        left,
        right,
        (a_scale, b_scale, recipe, recipe_a, recipe_b, disable_ue8m0_cast),
        dense=True,
    )
    if arch_major() == 9:
        accumulates = right.gran_mn == 1
        want = (True, torch.float32) if accumulates else (False, torch.bfloat16)
        got = f"{'a' if c is not None else 'no'} c and {short(d.dtype)} d"
        rule = f"{'with' if want[0] else 'without'} c and {short(want[1])} d on sm90"
        rule += f" for {right.gran_mn}x128 scales of b"
        fix = "fp32 accumulation takes recipe (1, 1, 128), a bf16 result (1, 128, 128)."
        require((c is not None, d.dtype) == want, op, "c and d", rule, got, fix)
        ok, fix = right.mn % 8 == 0, "Pad b with zero rows."
        require(ok, op, "n", "a multiple of 8 on sm90", right.mn, fix)
    check_kernel(op, left, right, d)
    _write(left, right, d, c, alpha)


def fp8_fp4_gemm_nn(
    a: Quantised,
    b: Quantised,
    d: torch.Tensor,
    c: torch.Tensor | None = None,
    recipe: Recipe | None = None,
    recipe_a: RecipePair | None = None,
    recipe_b: RecipePair | None = None,
    compiled_dims: str = "",
    disable_ue8m0_cast: bool = False,
    alpha: float | None = None,
) -> None:
    """fp8_fp4_gemm_nt with b and its scale transposed: b (k, n), scale (k groups, n groups)."""
    b = _transposed("fp8_fp4_gemm_nn", "b", b)
    tail = (c, recipe, recipe_a, recipe_b, compiled_dims, disable_ue8m0_cast, alpha)
    fp8_fp4_gemm_nt(a, b, d, *tail)


def fp8_fp4_gemm_tn(
    a: Quantised,
    b: Quantised,
    d: torch.Tensor,
    c: torch.Tensor | None = None,
    recipe: Recipe | None = None,
    recipe_a: RecipePair | None = None,
    recipe_b: RecipePair | None = None,
    compiled_dims: str = "",
    disable_ue8m0_cast: bool = False,
    alpha: float | None = None,
) -> None:
    """fp8_fp4_gemm_nt with both transposed: a (k, m), b (k, n), scales likewise."""
    op = "fp8_fp4_gemm_tn"
    a, b = _transposed(op, "a", a), _transposed(op, "b", b)
    tail = (c, recipe, recipe_a, recipe_b, compiled_dims, disable_ue8m0_cast, alpha)
    fp8_fp4_gemm_nt(a, b, d, *tail)


def fp8_fp4_gemm_tt(
    a: Quantised,
    b: Quantised,
    d: torch.Tensor,
    c: torch.Tensor | None = None,
    recipe: Recipe | None = None,
    recipe_a: RecipePair | None = None,
    recipe_b: RecipePair | None = None,
    compiled_dims: str = "",
    disable_ue8m0_cast: bool = False,
    alpha: float | None = None,
) -> None:
    """fp8_fp4_gemm_nt with a and its scale transposed: a (k, m), scale (k groups, m groups)."""
    a = _transposed("fp8_fp4_gemm_tt", "a", a)
    tail = (c, recipe, recipe_a, recipe_b, compiled_dims, disable_ue8m0_cast, alpha)
    fp8_fp4_gemm_nt(a, b, d, *tail)


def _transposed(op: str, name: str, operand: Quantised) -> Quantised:
    values, scale = split_pair(op, name, operand)
    _check.rank(op, name, values, 2, "a matrix")
    _check.rank(op, f"{name}'s scale", scale, 2, "a matrix")
    return values.mT, scale.mT


def bf16_gemm_nt(
    a: torch.Tensor,
    b: torch.Tensor,
    d: torch.Tensor,
    c: torch.Tensor | None = None,
    compiled_dims: str = "",
    alpha: float | None = None,
) -> None:
    """d = [c +] [alpha *] a @ b.T, a (m, k) and b (n, k) bf16, d bf16 or fp32; alpha on sm100."""
    op = "bf16_gemm_nt"
    _check.same_device(op, a=a, b=b, d=d, c=c)
    left, right = read_matrix(op, "a", a, 2, "(m, k)"), read_matrix(op, "b", b, 2, "(n, k)")
    check_bf16(op, a=left, b=right)
    check_same_k(op, left, right)
    _check.output(op, d, (left.mn, right.mn), "(m, n)", _RESULTS)
    _check_alpha(op, alpha)
    if _finished_early(op, left, right, d, c):
        return
    check_kernel(op, left, right, d)
    _write(left, right, d, c, alpha)


def bf16_gemm_nn(
    a: torch.Tensor,
    b: torch.Tensor,
    d: torch.Tensor,
    c: torch.Tensor | None = None,
    compiled_dims: str = "",
    alpha: float | None = None,
) -> None:
    """bf16_gemm_nt for b (k, n)."""
    bf16_gemm_nt(a, b.mT, d, c, compiled_dims, alpha)


def bf16_gemm_tn(
    a: torch.Tensor,
    b: torch.Tensor,
    d: torch.Tensor,
    c: torch.Tensor | None = None,
    compiled_dims: str = "",
    alpha: float | None = None,
) -> None:
    """bf16_gemm_nt for a (k, m) and b (k, n)."""
    bf16_gemm_nt(a.mT, b.mT, d, c, compiled_dims, alpha)


def bf16_gemm_tt(
    a: torch.Tensor,
    b: torch.Tensor,
    d: torch.Tensor,
    c: torch.Tensor | None = None,
    compiled_dims: str = "",
    alpha: float | None = None,
) -> None:
    """bf16_gemm_nt for a (k, m)."""
    bf16_gemm_nt(a.mT, b, d, c, compiled_dims, alpha)
