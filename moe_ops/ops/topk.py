"""moe::topk: router logits to the experts of each token and their weights."""

import torch
from torch import Tensor

from moe_ops.backends import lazy
from moe_ops.meta import topk as contract
from moe_ops.reference import topk as reference
from moe_ops.registry import define_op, define_packed_ws

_SCHEMA = (
    'Tensor logits, int top_k, *, str scoring="softmax", Tensor? bias=None, float? softcap=None, '
    'bool renormalize=True, int num_groups=1, int topk_group=1, str group_score="top2", '
    "float routed_scaling_factor=1.0, bool scale_output=False, int num_shared=0, Tensor? hash_table=None, "
    'Tensor? token_ids=None, Tensor? num_token_non_padded=None, str backend="auto"'
)

TOPK = define_op(
    "topk",
    f"({_SCHEMA}) -> (Tensor topk_weights, Tensor topk_ids)",
    contract=contract.topk,
    kernels={"reference": reference.topk, "triton": lazy("moe_ops.kernels.topk:topk")},
)
define_packed_ws(TOPK, f"(Tensor(a!) ws, {_SCHEMA}) -> ()")


def topk(
    logits: Tensor,
    top_k: int,
    *,
    scoring: str = "softmax",
    bias: Tensor | None = None,
    softcap: float | None = None,
    renormalize: bool = True,
    num_groups: int = 1,
    topk_group: int = 1,
    group_score: str = "top2",
    routed_scaling_factor: float = 1.0,
    scale_output: bool = False,
    num_shared: int = 0,
    hash_table: Tensor | None = None,
    token_ids: Tensor | None = None,
    num_token_non_padded: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Chooses each token's experts: the top_k largest scores + bias; a route weighs its score without the bias.

    Ties go to the lowest expert id on every device. A NaN logit ranks last and weighs 0; ids are always in [0, E).
    Weights are finite: if a token's scores all underflow, they stay 0 instead of becoming 0 / 0.

    Args:
        logits: (T, E) bf16, fp16 or fp32; computed in fp32.
        top_k: routed experts a token.
        scoring: softmax (Mixtral, Qwen3), sigmoid (DeepSeek-V3), sqrtsoftplus = sqrt(max(x, 0) + log1p(exp(-|x|)))
            (DeepSeek-V4), sqrtsoftplus_log1p = sqrt(x if x > 20 else log1p(exp(x))).
        bias: (E,) added for ranking only (e_score_correction_bias). A bias that belongs inside the softmax is a
            bias of the logits: add it to them.
        softcap: logits become softcap * tanh(logits / softcap) first.
        renormalize: divide a token's weights by their sum.
        num_groups, topk_group: rank groups of experts first and keep topk_group of them (noaux_tc).
        group_score: top2 (sum of the two largest keys, DeepSeek-V3) or max (DeepSeek-V2).
        routed_scaling_factor, scale_output: with scale_output, routed weights are multiplied here; else a later stage
            multiplies, and this op only sets shared slots to 1 / routed_scaling_factor so that they end up at 1.
        num_shared: extra slots a token for shared experts, ids E, E + 1, ...
        hash_table, token_ids: (vocabulary, top_k) and (T,) ints. Experts are the row of the token's id; scores only
            weigh them (the first layers of DeepSeek-V4).
        num_token_non_padded: one int on the device. Rows from there on are padding: ids -1, weights 0.

    Returns:
        topk_weights: (T, top_k + num_shared) fp32, by falling rank.
        topk_ids: (T, top_k + num_shared) int32.

    Raises:
        ValueError: sizes that do not fit; on the CPU also a token id outside the table or an expert id outside [0, E).
    """
    return torch.ops.moe.topk(
        logits,
        top_k,
        scoring=scoring,
        bias=bias,
        softcap=softcap,
        renormalize=renormalize,
        num_groups=num_groups,
        topk_group=topk_group,
        group_score=group_score,
        routed_scaling_factor=routed_scaling_factor,
        scale_output=scale_output,
        num_shared=num_shared,
        hash_table=hash_table,
        token_ids=token_ids,
        num_token_non_padded=num_token_non_padded,
        backend=backend,
    )
