"""deep_gemm's two grouped GEMMs alone, on rows that are ready: what a layer around them cannot beat with them.

In the three forms that say which rows are whose: labels, ends, or slabs with counts. The library's settings are its
own. Rows are sorted, quantised and summed by this package's ops, outside of what is timed.
"""

from typing import Any

import torch
from torch import Tensor

from moe_ops import ops
from moe_ops.backends import why_not_grouped
from moe_ops.bench.cases import Case
from moe_ops.bench.peers.peer import Peer
from moe_ops.kernels.deep_gemm import library
from moe_ops.rows import BLOCK, align, masked_rows

MOST_SLAB_ROWS = 128 * 512
"""Rows of all slabs together up to which the masked form is timed."""


def why_no_deep_gemm(case: Case, layout: str = "contiguous") -> str | None:
    """Why deep_gemm cannot compute this case here, or None."""
    weights, depths = case.weights, (case.shape.K, case.shape.I)
    return why_not_grouped(case.device, weights.recipe, weights.scale_format, layout, depths)


class _Pair(Peer):
    recipe = "fp8_block"
    whole = False

    def prepare(self) -> None:
        weights, (x, _, topk_ids) = self.case.weights, self.case.inputs
        self._dg: Any = library()
        self._form: dict[str, Any] = dict(recipe=weights.recipe, scale_format=weights.scale_format)
        self._x_q, self._x_scale, self._rows, self._src2dst = self.sort(x, topk_ids)
        lead = self._x_q.shape[:-1]
        self._gateup = torch.empty(*lead, 2 * self.case.shape.I, dtype=torch.bfloat16, device=x.device)
        self._down = torch.empty(*lead, self.case.shape.K, dtype=torch.bfloat16, device=x.device)
        self.gemm((self._x_q, self._x_scale), (weights.w13, weights.w13_scale), self._gateup)
        self._act = self.activate()
        self._first = ((self._x_q, self._x_scale), (weights.w13, weights.w13_scale), self._gateup)
        self._second = (self._act, (weights.w2, weights.w2_scale), self._down)

    def run(self) -> Tensor:
        self.gemm(*self._first)
        self.gemm(*self._second)
        return self._down

    def finish(self, result: Tensor) -> Tensor:
        return ops.post_permute(result, self._src2dst, self.case.inputs[1])

    def sort(self, x: Tensor, topk_ids: Tensor) -> tuple[Tensor, ...]:
        """(x_q, x_scale, row map, src2dst). Without the blocks that this routing leaves empty."""
        form: dict[str, Any] = dict(num_local_experts=self.case.shape.E, **self._form)
        x_q, x_scale, m_indices, src2dst = ops.pre_permute_contiguous(x, topk_ids, **form)
        used = align(int((m_indices >= 0).nonzero().max()) + 1, BLOCK)
        return x_q[:used], x_scale[:used].t().contiguous().t(), m_indices[:used], src2dst

    def activate(self) -> tuple[Tensor, Tensor]:
        """(act_q, act_scale) of the first GEMM's result."""
        return ops.silu_and_quant_contiguous(self._gateup, self._rows, **self._form)

    def gemm(self, rows: tuple, weight: tuple, out: Tensor) -> None:
        """One grouped GEMM."""
        raise NotImplementedError


class ContiguousPair(_Pair):
    name = "deep_gemm pair, contiguous"

    def why_not(self) -> str | None:
        return why_no_deep_gemm(self.case)

    def gemm(self, rows: tuple, weight: tuple, out: Tensor) -> None:
        self._dg.m_grouped_fp8_fp4_gemm_nt_contiguous(rows, weight, out, self._rows)


class PsumPair(ContiguousPair):
    name = "deep_gemm pair, psum"

    def prepare(self) -> None:
        ids = self.case.inputs[2]
        counts = torch.bincount(ids[ids >= 0].long(), minlength=self.case.shape.E)
        blocks = align(counts, BLOCK)
        self._ends = (blocks.cumsum(0) - blocks + counts).int()  # each expert starts on a whole block
        super().prepare()

    def gemm(self, rows: tuple, weight: tuple, out: Tensor) -> None:
        self._dg.m_grouped_fp8_fp4_gemm_nt_contiguous(rows, weight, out, self._ends, use_psum_layout=True)


class MaskedPair(_Pair):
    name = "deep_gemm pair, masked"

    def why_not(self) -> str | None:
        rows = self.case.shape.E * masked_rows(self.case.T)
        if rows > MOST_SLAB_ROWS:
            return f"Its slabs would have {rows} rows."
        return why_no_deep_gemm(self.case, "masked")

    def sort(self, x: Tensor, topk_ids: Tensor) -> tuple[Tensor, ...]:
        form: dict[str, Any] = dict(num_local_experts=self.case.shape.E, **self._form)
        return ops.pre_permute_masked(x, topk_ids, **form)

    def activate(self) -> tuple[Tensor, Tensor]:
        return ops.silu_and_quant_masked(self._gateup, self._rows, **self._form)

    def gemm(self, rows: tuple, weight: tuple, out: Tensor) -> None:
        mean = max(1, -(-self.case.routes // self.case.shape.E))
        self._dg.m_grouped_fp8_fp4_gemm_nt_masked(rows, weight, out, self._rows, mean)
