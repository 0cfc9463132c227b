"""deep_gemm's fp8_mega_moe on a group of one rank: the whole layer in one kernel, behind one that quantises tokens."""

import importlib
import tempfile
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from moe_ops import arch, env
from moe_ops.bench.peers.deep_gemm_pair import why_no_deep_gemm
from moe_ops.bench.peers.peer import Peer
from moe_ops.kernels.deep_gemm import library

_CALLS = (
    "fp8_mega_moe",
    "get_symm_buffer_for_mega_moe",
    "mega_moe_pre_dispatch_sm90",
    "transform_weights_for_mega_moe_sm90",
)


class DeepGemmMega(Peer):
    name = "deep_gemm mega"
    recipe = "fp8_block"
    _weights: ClassVar[tuple[Any, tuple] | None] = None

    def why_not(self) -> str | None:
        reason = why_no_deep_gemm(self.case)
        if reason is not None:
            return reason
        if arch.arch_of("bench", self.case.device) != "sm90":
            return "fp8_mega_moe is a kernel for Hopper."
        missing = [name for name in _CALLS if not hasattr(library(), name)]
        return f"This deep_gemm has no {missing[0]}." if missing else None

    def prepare(self) -> None:
        dg: Any = library()
        shape, weights = self.case.shape, self.case.weights
        kind = type(self)
        if kind._weights is None or kind._weights[0] is not weights:
            pairs = (weights.w13, weights.w13_scale), (weights.w2, weights.w2_scale)
            kind._weights = (weights, dg.transform_weights_for_mega_moe_sm90(*pairs))
        self._pairs = kind._weights[1]
        self._dg = dg
        self._buffer = dg.get_symm_buffer_for_mega_moe(
            _one_rank(),
            num_experts=shape.E,
            num_max_tokens_per_rank=self.case.T,
            num_topk=shape.top_k,
            hidden=shape.K,
            intermediate_hidden=shape.I,
        )
        self._out = torch.empty_like(self.case.inputs[0])

    def run(self) -> Tensor:
        x, topk_weights, topk_ids = self.case.inputs
        to = self._buffer
        self._dg.mega_moe_pre_dispatch_sm90(
            x, topk_ids, topk_weights, to.x, to.x_sf, to.topk_idx, to.topk_weights, self.case.T
        )
        self._dg.fp8_mega_moe(self._out, *self._pairs, to)
        return self._out


def _one_rank() -> Any:
    """This process alone, as a group."""
    env.switch_off_multicast()
    importlib.import_module("torch.distributed._symmetric_memory")
    if not dist.is_initialized():
        meeting = Path(tempfile.mkdtemp()) / "group"
        device = torch.device("cuda", torch.cuda.current_device())
        dist.init_process_group("nccl", init_method=f"file://{meeting}", rank=0, world_size=1, device_id=device)
    return dist.group.WORLD
