"""Calls of the dense GEMMs for kernel_cases: every scale format, every tile, sizes that are no multiple of one."""

from collections.abc import Iterator

import torch
from torch import Tensor

from moe_ops.ops.pack_scale import pack_scale
from moe_ops.ops.quantize import quantize
from moe_ops.testing.kernel_check import KernelCase

FORMS = [("gemm_nt_fp8", "fp32"), ("gemm_nt_fp8", "ue8m0"), ("gemm_nt_mxfp8", "ue8m0"), ("gemm_nt_bf16_fp32", "none")]
"""(op, scale format) of the products alone."""


def rows(M: int, K: int, seed: int = 0) -> Tensor:
    """(M, K) bf16. The last of several rows holds a NaN: nothing of it may reach another one."""
    x = torch.randn(M, K, generator=torch.Generator().manual_seed(seed))
    if M > 1:
        x[-1, K // 2] = float("nan")
    return x.bfloat16()


def dense_operands(op: str, scale_format: str, M: int, N: int, K: int, seed: int = 0) -> dict:
    """Arguments of a product, backend aside, quantised as its documentation says."""
    x, w = rows(M, K, seed), torch.randn(N, K, generator=torch.Generator().manual_seed(seed + 1))
    if scale_format == "none":
        return dict(x=x, w=w.bfloat16())
    group = 32 if op == "gemm_nt_mxfp8" else 128
    x_q, x_scale = quantize(x, group=group, scale_format=scale_format)
    if group == 32:
        w_q, w_scale = quantize(w, group=group, scale_format=scale_format)
    else:
        w_q, w_scale = quantize(w, granularity="block", scale_format=scale_format)
        w_scale = pack_scale(w_scale, N, rows_per_scale=128) if scale_format == "ue8m0" else w_scale
    return dict(x=x_q, x_scale=x_scale, w=w_q, w_scale=w_scale)


def hc_operands(M: int, N: int, K: int, num_splits: int | None, seed: int = 0) -> dict:
    fn = torch.randn(N, K, generator=torch.Generator().manual_seed(seed + 1)) / K**0.5
    return dict(x=rows(M, K, seed), fn=fn, num_splits=num_splits)


def dense_cases(large: bool = False) -> Iterator[KernelCase]:
    for op, scale_format in FORMS:
        if large:
            sizes = [(M, 7168, 2048) for M in (1, 17, 700)] + [(M, 256, 7168) for M in (1, 60, 2000)]
            sizes += [(300, 1000, 1536)]
        else:
            sizes = [(0, 24, 256), (1, 1, 128), (1, 200, 640), (20, 136, 384), (60, 130, 256), (130, 129, 256)]
            # A K that is no multiple of a tile's depth; one that is divided into ranges.
            sizes += {"gemm_nt_mxfp8": [(5, 24, 32), (5, 130, 288)], "gemm_nt_bf16_fp32": [(5, 24, 7)]}.get(op, [])
            sizes += [(3, 24, 1100), (70, 130, 1024)] if scale_format == "none" else []
        for size in sizes:
            name = f"{scale_format}-M{size[0]}-N{size[1]}-K{size[2]}"
            yield KernelCase(op, name, lambda a=(op, scale_format, *size): dense_operands(*a))

    calls = [(0, 24, 128, None), (1, 24, 64, None), (5, 24, 320, 3), (5, 8, 320, 7), (70, 3, 1088, None)]
    calls += [(3, 70, 128, 1), (65, 24, 1024, None)]
    if large:
        calls = [(M, 24, K, splits) for M in (1, 137, 4096) for K in (7168, 28672) for splits in (None, 16)]
    for call in calls:
        arguments: tuple = call
        yield KernelCase("hc_prenorm_gemm", "-".join(map(str, call)), lambda a=arguments: hc_operands(*a))
