"""Reference of moe::hc_prenorm_gemm: float32 throughout, one range of K after another."""

import torch

from moe_ops.recipes import SPLIT_BLOCK


def hc_prenorm_gemm(outputs, *, x, fn, num_splits) -> None:
    splits = num_splits or 1
    out, sqr_sum = outputs if num_splits else (result[None] for result in outputs)
    blocks = torch.arange(0, x.shape[1], SPLIT_BLOCK).tensor_split(splits)  # the first ranges are one block longer
    for index, starts in enumerate(blocks):
        first = int(starts[0]) if len(starts) else 0
        columns = slice(first, first + len(starts) * SPLIT_BLOCK)
        rows = x[:, columns].float()
        out[index] = rows @ fn[:, columns].T
        sqr_sum[index] = rows.square().sum(1)
