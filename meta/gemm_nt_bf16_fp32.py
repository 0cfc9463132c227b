"""Contract of moe::gemm_nt_bf16_fp32, and the checks of plain matrices that the dense GEMMs share."""

import torch

from moe_ops import check
from moe_ops.recipes import DENSE, RECIPES
from moe_ops.spec import TensorSpec


def check_matrix(op: str, argument: str, matrix, dtype: torch.dtype, letters: str, fix: str) -> None:
    """Checks that an operand is a contiguous matrix of this dtype; `fix` says where one comes from."""
    check.value(matrix.dim() == 2, op, argument, f"of shape {letters}", lambda: tuple(matrix.shape), fix)
    check.dtype(op, argument, matrix, (dtype,), fix)
    spec = TensorSpec.contiguous(*matrix.shape, dtype=dtype)
    check.layout(op, argument, matrix, spec, "contiguous (K-major)", "Call .contiguous() on it.")


def check_same_k(op: str, argument: str, matrix, x) -> None:
    """Checks that the second operand has the columns of x."""
    check.shape(op, argument, matrix, (None, x.shape[1]), "(N, K)", "Both operands are contracted along K.")


def gemm_nt_bf16_fp32(*, x, w, backend) -> tuple[TensorSpec]:
    op = "gemm_nt_bf16_fp32"
    recipe = RECIPES[DENSE[op]]
    check_matrix(op, "x", x, recipe.x_dtype, "(M, K)", "Flatten it to rows, and cast it with .bfloat16().")
    check_matrix(op, "w", w, recipe.w_dtype, "(N, K)", "Pass one weight matrix, and cast it with .bfloat16().")
    check_same_k(op, "w", w, x)
    check.same_device(op, x.device, w=w)
    return (TensorSpec.contiguous(x.shape[0], w.shape[0], dtype=torch.float32),)
