"""Contract of moe::topk."""

import torch

from moe_ops import check
from moe_ops.recipes import FLOATS
from moe_ops.spec import TensorSpec

SCORINGS = ("softmax", "sigmoid", "sqrtsoftplus", "sqrtsoftplus_log1p")
GROUP_SCORES = ("top2", "max")


def topk_specs(T, width: int) -> tuple[TensorSpec, TensorSpec]:
    """(weights, ids) for `width` routes a token."""
    return (
        TensorSpec.contiguous(T, width, dtype=torch.float32),
        TensorSpec.contiguous(T, width, dtype=torch.int32),
    )


def topk(
    *,
    logits,
    top_k,
    scoring,
    bias,
    softcap,
    renormalize,
    num_groups,
    topk_group,
    group_score,
    routed_scaling_factor,
    scale_output,
    num_shared,
    hash_table,
    token_ids,
    num_token_non_padded,
    backend,
) -> tuple[TensorSpec, TensorSpec]:
    op = "topk"
    check.value(logits.dim() == 2, op, "logits", "of shape (T, E)", lambda: tuple(logits.shape), "Flatten the tokens.")
    check.dtype(op, "logits", logits, FLOATS, "Cast them first.")
    T, E = logits.shape
    check.one_of(op, "scoring", scoring, SCORINGS)
    check.value(1 <= top_k <= E, op, "top_k", f"between 1 and the number of experts {E}", top_k, "Lower it.")
    check.value(num_shared >= 0, op, "num_shared", "at least 0", num_shared, "It counts shared-expert slots.")
    check.value(softcap is None or softcap > 0, op, "softcap", "positive", softcap, "Pass None for no cap.")
    check.value(
        routed_scaling_factor > 0,
        op,
        "routed_scaling_factor",
        "positive",
        routed_scaling_factor,
        "1.0 changes nothing.",
    )
    if bias is not None:
        check.shape(op, "bias", bias, (E,), "(E,)", "One value per expert.")
        check.dtype(op, "bias", bias, FLOATS, "Cast it first.")
    _check_groups(op, top_k, E, num_groups, topk_group, group_score)
    _check_hash(op, T, top_k, hash_table, token_ids, bias, num_groups)
    if num_token_non_padded is not None:
        check.value(
            num_token_non_padded.numel() == 1,
            op,
            "num_token_non_padded",
            "a tensor of one element",
            lambda: tuple(num_token_non_padded.shape),
            "It counts the real rows at the front.",
        )
        check.dtype(op, "num_token_non_padded", num_token_non_padded, (torch.int32, torch.int64), "Cast it first.")
    check.same_device(
        op,
        logits.device,
        bias=bias,
        hash_table=hash_table,
        token_ids=token_ids,
        num_token_non_padded=num_token_non_padded,
    )
    return topk_specs(T, top_k + num_shared)


def _check_groups(op: str, top_k: int, E, num_groups: int, topk_group: int, group_score: str) -> None:
    check.one_of(op, "group_score", group_score, GROUP_SCORES)
    check.value(num_groups >= 1, op, "num_groups", "at least 1", num_groups, "1 means ungrouped.")
    check.value(
        1 <= topk_group <= num_groups,
        op,
        "topk_group",
        f"between 1 and num_groups={num_groups}",
        topk_group,
        "It counts the groups a token may use.",
    )
    if num_groups == 1:
        return
    check.multiple(op, "the number of experts", E, num_groups, "Groups are equal runs of experts.")
    reach = E // num_groups * topk_group
    check.value(
        top_k <= reach,
        op,
        "top_k",
        f"at most the {reach} experts of topk_group={topk_group} groups",
        top_k,
        "Raise topk_group.",
    )
    if group_score == "top2":
        check.value(
            E // num_groups >= 2, op, "group_score", "max for groups of one expert", "'top2'", "Pass group_score='max'."
        )


def _check_hash(op: str, T, top_k: int, hash_table, token_ids, bias, num_groups: int) -> None:
    check.value(
        (hash_table is None) == (token_ids is None),
        op,
        "hash_table",
        "given together with token_ids",
        "only one of them",
        "Hash routing looks the experts of a token id up; pass both or neither.",
    )
    if hash_table is None:
        return
    check.value(
        bias is None and num_groups == 1,
        op,
        "hash_table",
        "used without bias and groups",
        "one of these",
        "The table fixes the experts, so nothing is left to rank.",
    )
    check.shape(op, "hash_table", hash_table, (None, top_k), "(vocabulary, top_k)", "One row per token id.")
    check.dtype(op, "hash_table", hash_table, (torch.int32, torch.int64), "It holds expert ids.")
    check.shape(op, "token_ids", token_ids, (T,), "(T,)", "One id per row of logits.")
    check.dtype(op, "token_ids", token_ids, (torch.int32, torch.int64), "It holds token ids.")
