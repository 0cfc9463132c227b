"""The GEMM before a hyper-connection's norm: a product and sums of squares in one pass."""

import torch

from . import _check
from ._arch import arch_major
from ._check import require, sizes
from ._matrix import check_bf16, check_k_major, check_same_k, read_matrix

_BLOCK_K = 64


def tf32_hc_prenorm_gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    d: torch.Tensor,
    sqr_sum: torch.Tensor,
    num_splits: int | None = None,
) -> None:
    """d = a @ b.T and sqr_sum = (a * a).sum(1), or partial sums over num_splits ranges of k.

    The tensor cores round b to tf32; here it is multiplied as it is.

    Args:
        a: (m, k) bf16, k a multiple of 64.
        b: (n, k) fp32, n a multiple of 8 up to 32 on sm90, up to 128 elsewhere.
        d: (m, n) fp32, or (num_splits, m, n); written.
        sqr_sum: (m,) fp32, or (num_splits, m); written.
        num_splits: None: whole sums. Else ranges of whole blocks of 64, the first ones longer.

    Raises:
        ValueError, TypeError: shape, strides; dtype, device.
    """
    op = "tf32_hc_prenorm_gemm"
    _check.same_device(op, a=a, b=b, d=d, sqr_sum=sqr_sum)
    left, right = read_matrix(op, "a", a, 2, "(m, k)"), read_matrix(op, "b", b, 2, "(n, k)")
    check_k_major(op, a=left, b=right)
    check_bf16(op, a=left)
    _check.dtype(op, "b", b, [torch.float32], "Convert it with .float().")
    check_same_k(op, left, right)
    splits = () if num_splits is None else (num_splits,)
    ok = num_splits is None or num_splits >= 1
    require(ok, op, "num_splits", "None or at least 1", num_splits, "None writes whole sums.")
    prefix = "(num_splits, " if splits else "("
    shape = (*splits, left.mn, right.mn)
    _check.output(op, d, shape, f"{prefix}m, n)", [torch.float32])
    _check.dtype(op, "sqr_sum", sqr_sum, [torch.float32], "Allocate it in fp32.")
    rule = f"of shape {prefix}m) = {sizes(shape[:-1])}"
    fix = "Allocate it from a's rows."
    require(sqr_sum.shape == shape[:-1], op, "sqr_sum", rule, sizes(sqr_sum.shape), fix)
    got = f"strides {sizes(sqr_sum.stride())}"
    require(sqr_sum.is_contiguous(), op, "sqr_sum", "contiguous", got, "Call .contiguous().")
    ok = right.mn > 0 and left.k > 0
    got = f"n={right.mn}, k={left.k}"
    require(ok, op, "n and k", "positive", got, "Skip the call.")
    if left.mn == 0:
        return
    most = 32 if arch_major() == 9 else 128
    ok = right.mn % 8 == 0 and right.mn <= most
    rule = f"a multiple of 8 up to {most} on sm{arch_major()}0"
    require(ok, op, "n", rule, right.mn, "Pad b with zero rows.")
    fix = "Pad a and b with zero columns."
    require(left.k % _BLOCK_K == 0, op, "k", f"a multiple of {_BLOCK_K}", left.k, fix)
    for name, tensor in {"a": a, "b": b, "d": d}.items():
        _check.tma(op, name, tensor)

    blocks = torch.arange(left.k // _BLOCK_K).tensor_split(num_splits or 1)
    for index, part in enumerate(blocks):
        start = int(part[0]) * _BLOCK_K if len(part) else 0
        columns = slice(start, start + len(part) * _BLOCK_K)
        x, y = a[:, columns].double(), b[:, columns].double()
        where = index if splits else ...
        d[where] = (x @ y.mT).float()
        sqr_sum[where] = (x * x).sum(1).float()
