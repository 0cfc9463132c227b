"""Contract of moe::hc_prenorm_gemm."""

import torch

from moe_ops import check
from moe_ops.meta.gemm_nt_bf16_fp32 import check_matrix, check_same_k
from moe_ops.recipes import DENSE, RECIPES, SPLIT_BLOCK
from moe_ops.spec import TensorSpec


def hc_prenorm_gemm(*, x, fn, num_splits, backend) -> tuple[TensorSpec, TensorSpec]:
    op = "hc_prenorm_gemm"
    check_matrix(op, "x", x, RECIPES[DENSE[op]].x_dtype, "(M, K)", "Flatten it to rows, and cast it with .bfloat16().")
    check_matrix(op, "fn", fn, torch.float32, "(N, K)", "Pass one weight matrix, and cast it with .float().")
    check_same_k(op, "fn", fn, x)
    check.multiple(op, "K", x.shape[1], SPLIT_BLOCK, "Pad x and fn with zero columns.")
    check.value(fn.numel() > 0, op, "fn", "of at least one row and column", lambda: tuple(fn.shape), "Skip the call.")
    ok = num_splits is None or num_splits >= 1
    check.value(ok, op, "num_splits", "None or at least 1", num_splits, "None returns whole sums.")
    check.same_device(op, x.device, fn=fn)
    rows = (x.shape[0],) if num_splits is None else (num_splits, x.shape[0])
    out = TensorSpec.contiguous(*rows, fn.shape[0], dtype=torch.float32)
    return out, TensorSpec.contiguous(*rows, dtype=torch.float32)
