"""moe_ops in torchtitan: an override of its grouped experts, for forwards without gradients.

    --override.imports moe_ops.integrations.torchtitan.moe_ops_experts

Validation and generation run in moe_ops; a forward that wants gradients is torchtitan's own, because moe_ops has no
backward. Read off torchtitan 0.3.
"""

from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from moe_ops.integrations.engines import imported

OP = "moe_ops.integrations.torchtitan"


def moe_ops_experts(config):
    """The override: a GroupedExperts.Config -> one of the same fields that builds MoeOpsGroupedExperts."""
    (derive,) = imported(OP, "torchtitan 0.3", "torchtitan.config.override", "derive")
    return derive(config, experts_class().Config)


@cache
def experts_class() -> Any:
    """MoeOpsGroupedExperts, a GroupedExperts."""
    (base,) = imported(OP, "torchtitan 0.3", "torchtitan.models.common.moe", "GroupedExperts")

    class MoeOpsGroupedExperts(base):
        @dataclass(kw_only=True, slots=True)
        class Config(base.Config):
            """torchtitan's own; each Config builds the class that it is defined in."""

        def forward(self, x_RD: Tensor, num_tokens_per_expert_E: Tensor) -> Tensor:
            """(R, D) -> (R, D). Rows sorted by expert; those past the counts are zero."""
            if torch.is_grad_enabled():
                return super().forward(x_RD, num_tokens_per_expert_E)
            return _experts(x_RD, num_tokens_per_expert_E, *map(_local, (self.w1_EFD, self.w3_EFD, self.w2_EDF)))

    return MoeOpsGroupedExperts


def _experts(x: Tensor, counts: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """Each row is a token with one route of weight 1. Gate and up are parameters apart, so GEMM1 runs twice: laying
    them together at every call would move more bytes than the rows have."""
    moe, E = torch.ops.moe, down.shape[0]
    rows = torch.arange(x.shape[0], device=x.device)
    expert = torch.searchsorted(counts.cumsum(0), rows, right=True)
    ids = torch.where(expert < E, expert, -1).unsqueeze(1)
    form = dict(recipe="bf16", scale_format="none")
    x_q, _, m_indices, src2dst = moe.pre_permute_contiguous(x, ids, num_local_experts=E, **form)
    weight = dict(m_indices=m_indices, recipe="bf16")
    halves = [moe.grouped_gemm_contiguous(x_q, None, w, None, **weight) for w in (gate, up)]
    act, _ = moe.silu_and_quant_contiguous(torch.cat(halves, 1), m_indices, **form)
    out = moe.grouped_gemm_contiguous(act, None, down, None, **weight)
    ones = torch.ones(ids.shape, dtype=torch.float32, device=x.device)
    return moe.post_permute(out, src2dst, ones, topk_ids=ids, dtype=x.dtype)


def _local(parameter: Any) -> Tensor:
    """This rank's part, in bf16 as torchtitan's own forward takes it."""
    return (parameter.to_local() if hasattr(parameter, "to_local") else parameter).bfloat16().contiguous()


def register() -> None:
    """Makes the override known to torchtitan under this module's name. Importing the module does it."""
    (override,) = imported(OP, "torchtitan 0.3", "torchtitan.config.override", "override")
    (base,) = imported(OP, "torchtitan 0.3", "torchtitan.models.common.moe", "GroupedExperts")
    override(target=base.Config, description="moe_ops experts where no gradients are wanted", exact=True)(
        moe_ops_experts
    )


if find_spec("torchtitan") is not None:
    register()
