"""torch's grouped_mm in a plain bf16 layer: sort, gather, GEMM, activation, GEMM, weighted sum; not compiled."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_ops.bench.peers.peer import Peer


class TorchGroupedMM(Peer):
    name = "torch grouped_mm"
    recipe = "bf16"

    def why_not(self) -> str | None:
        return None if self._product() else "This torch has no grouped_mm."

    def prepare(self) -> None:
        self._grouped: Any = self._product()
        self._experts = torch.arange(self.case.shape.E, device=self.case.device)

    def run(self) -> Tensor:
        x, topk_weights, topk_ids = self.case.inputs
        w13, w2 = self.case.weights.w13, self.case.weights.w2
        T, top_k = topk_ids.shape
        expert, order = topk_ids.flatten().sort(stable=True)
        offs = torch.searchsorted(expert, self._experts, right=True, out_int32=True)
        gate, up = self._grouped(x[order // top_k], w13.transpose(-2, -1), offs=offs).chunk(2, -1)
        down = self._grouped(F.silu(gate) * up, w2.transpose(-2, -1), offs=offs)
        routes = torch.empty_like(down)
        routes[order] = down * topk_weights.flatten()[order, None].to(down.dtype)
        return routes.view(T, top_k, -1).sum(1)

    @staticmethod
    def _product():
        return getattr(F, "grouped_mm", None) or getattr(torch, "_grouped_mm", None)
