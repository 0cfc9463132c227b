"""Reference of moe::gemm_nt_fp8: dequantise, multiply in float32, round once."""

from moe_ops.recipes import DENSE, RECIPES
from moe_ops.reference.quantize import dequantize_rows, dequantize_weight


def multiply(op: str, out, x, x_scale, w, w_scale) -> None:
    """Into out, the product of the operands of a quantised dense GEMM."""
    recipe = RECIPES[DENSE[op]]
    out.copy_(dequantize_rows(x, x_scale, recipe) @ dequantize_weight(w, w_scale, recipe).T)


def gemm_nt_fp8(outputs, *, x, x_scale, w, w_scale) -> None:
    (out,) = outputs
    multiply("gemm_nt_fp8", out, x, x_scale, w, w_scale)
