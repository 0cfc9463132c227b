"""moe::pre_permute_{contiguous,masked,gathered} and moe::pre_permute_ws: tokens to expert-sorted, quantised rows."""

import torch
from torch import Tensor

from moe_ops.backends import lazy
from moe_ops.meta import pre_permute as contract
from moe_ops.reference import pre_permute as reference
from moe_ops.registry import define_op, define_ws
from moe_ops.workspace import LAYER_SCHEMA, Stage

_SCHEMA = (
    'Tensor hidden_states, Tensor topk_ids, *, int num_local_experts, str recipe, str scale_format="fp32", '
    'int expert_start=0, str backend="auto"'
)

CONTIGUOUS = define_op(
    "pre_permute_contiguous",
    f"({_SCHEMA}) -> (Tensor x_q, Tensor x_scale, Tensor m_indices, Tensor src2dst)",
    contract=contract.pre_permute_contiguous,
    kernels={
        "reference": reference.pre_permute_contiguous,
        "triton": lazy("moe_ops.kernels.pre_permute:pre_permute_contiguous"),
    },
    scratch=2,  # ends too: an op's results fit those of pre_permute_masked
)
MASKED = define_op(
    "pre_permute_masked",
    f"({_SCHEMA}) -> (Tensor x_q, Tensor x_scale, Tensor masked_m, Tensor src2dst)",
    contract=contract.pre_permute_masked,
    kernels={
        "reference": reference.pre_permute_masked,
        "triton": lazy("moe_ops.kernels.pre_permute:pre_permute_masked"),
    },
    scratch=1,
)
GATHERED = define_op(
    "pre_permute_gathered",
    "(Tensor hidden_states, Tensor topk_ids, *, int num_local_experts, int block_m, str recipe, "
    'str scale_format="fp32", int expert_start=0, str backend="auto") '
    "-> (Tensor x_q, Tensor x_scale, Tensor row_token, Tensor tiles, Tensor src2dst)",
    contract=contract.pre_permute_gathered,
    kernels={
        "reference": reference.pre_permute_gathered,
        "triton": lazy("moe_ops.kernels.pre_permute_gathered:pre_permute_gathered"),
    },
    scratch=1,
)


def _ws(*, ws, hidden_states, topk_ids, expert_start, backend, **sizes) -> None:
    stage = Stage("pre_permute_ws", ws, hidden_states, topk_ids, backend=backend, **sizes)
    layout = stage.layer.layout
    if layout == "direct":  # its GEMM1 reads tokens and ids as they are
        return
    arguments = dict(
        hidden_states=hidden_states,
        topk_ids=topk_ids,
        num_local_experts=stage.layer.E,
        recipe=stage.layer.recipe,
        scale_format=stage.layer.scale_format,
        expert_start=expert_start,
        backend=backend,
    )
    if layout == "gathered":
        names = ("x_q", "x_scale", "row_token", "tiles", "src2dst", "scratch")
        GATHERED.into(tuple(stage[name] for name in names), block_m=stage.block_m, **arguments)
    else:
        contiguous = layout == "contiguous"
        rows = ("m_indices", "src2dst", "ends") if contiguous else ("masked_m", "src2dst")
        names = ("x_q", "x_scale", *rows, "scratch")
        (CONTIGUOUS if contiguous else MASKED).into(tuple(stage[name] for name in names), **arguments)


define_ws(
    "pre_permute_ws",
    f"(Tensor(a!) ws, Tensor hidden_states, Tensor topk_ids, int expert_start, {LAYER_SCHEMA}) -> ()",
    _ws,
)


def pre_permute_contiguous(
    hidden_states: Tensor,
    topk_ids: Tensor,
    *,
    num_local_experts: int,
    recipe: str,
    scale_format: str = "fp32",
    expert_start: int = 0,
    backend: str = "auto",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Sorts tokens by expert into one list of rows, each expert padded to blocks of 128, and quantises them.

    A row per token and distinct expert, in source order, so the result is the same on every run. Ids outside
    [expert_start, expert_start + num_local_experts), -1 among them, get no row.

    Args:
        hidden_states: (T, K) bf16, fp16 or fp32.
        topk_ids: (T, top_k) int32 or int64, global expert ids.
        num_local_experts: E, the experts on this rank.
        recipe: name in RECIPES; fixes dtype and group of the rows.
        scale_format: none (bf16), fp32 or ue8m0: that of the prepared weights.
        expert_start: this rank's first expert id.

    Returns:
        x_q: (M, K) in the recipe's dtype; M is the worst case for T tokens (rows.contiguous_rows). Padding rows are 0.
        x_scale: (M, G) fp32 or (M, ceil(G / 4)) int32, MN-major; empty for bf16.
        m_indices: (M,) int32, the expert of each row, -1 for padding.
        src2dst: (T, top_k) int32, the row of each route, -1 where it has none.

    Raises:
        ValueError: K is not a multiple of the recipe's group, or shapes disagree. TypeError: a dtype.
    """
    return torch.ops.moe.pre_permute_contiguous(
        hidden_states,
        topk_ids,
        num_local_experts=num_local_experts,
        recipe=recipe,
        scale_format=scale_format,
        expert_start=expert_start,
        backend=backend,
    )


def pre_permute_masked(
    hidden_states: Tensor,
    topk_ids: Tensor,
    *,
    num_local_experts: int,
    recipe: str,
    scale_format: str = "fp32",
    expert_start: int = 0,
    backend: str = "auto",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Sorts tokens by expert into one slab an expert and quantises them. Arguments as in pre_permute_contiguous.

    Returns:
        x_q: (E, m_max, K) in the recipe's dtype, m_max = T rounded up to 128. Rows past masked_m[e] are 0.
        x_scale: (E, m_max, G) fp32 or (E, m_max, ceil(G / 4)) int32, MN-major; empty for bf16.
        masked_m: (E,) int32, valid rows of each slab.
        src2dst: (T, top_k) int32, e * m_max + slot of each route, -1 where it has none.
    """
    return torch.ops.moe.pre_permute_masked(
        hidden_states,
        topk_ids,
        num_local_experts=num_local_experts,
        recipe=recipe,
        scale_format=scale_format,
        expert_start=expert_start,
        backend=backend,
    )


def pre_permute_gathered(
    hidden_states: Tensor,
    topk_ids: Tensor,
    *,
    num_local_experts: int,
    block_m: int,
    recipe: str,
    scale_format: str = "fp32",
    expert_start: int = 0,
    backend: str = "auto",
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Quantises tokens where they are, sorts their routes by expert and cuts them into tiles of one expert.

    A row per route, in source order; a token that names an expert twice has two. Arguments as in
    pre_permute_contiguous, and block_m: rows of a tile, 16, 32, 64 or 128.

    Returns:
        x_q: (T, K) in the recipe's dtype. x_scale: (T, G) fp32 or (T, ceil(G / 4)) int32, MN-major; empty for bf16.
        row_token: (T * top_k,) int32, the token of each row. Behind the last row: unspecified.
        tiles: (3, tiles) int32: expert, first row, rows. Tiles behind the last have expert -1 and nothing else.
        src2dst: (T, top_k) int32, the row of each route, -1 where it has none.
    """
    return torch.ops.moe.pre_permute_gathered(
        hidden_states,
        topk_ids,
        num_local_experts=num_local_experts,
        block_m=block_m,
        recipe=recipe,
        scale_format=scale_format,
        expert_start=expert_start,
        backend=backend,
    )
