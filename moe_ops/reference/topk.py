"""Reference of moe::topk. Scores and weights in float32; ties go to the lowest expert id; NaN ranks last, weighs 0."""

import torch
import torch.nn.functional as F


def topk(
    outputs,
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
) -> None:
    weights_out, ids_out = outputs
    T, E = logits.shape
    real = torch.ones(T, dtype=torch.bool, device=logits.device)
    if num_token_non_padded is not None:
        real = torch.arange(T, device=logits.device) < num_token_non_padded.reshape(())
    scores = _scores(logits.float(), scoring, softcap)
    if hash_table is not None:
        ids = torch.zeros(T, top_k, dtype=torch.int64, device=logits.device)
        ids[real] = _look_up(hash_table, token_ids, real, E)
    else:
        keys = scores if bias is None else scores + bias.float()
        keys = keys.masked_fill(logits.isnan() | keys.isnan(), float("-inf"))
        if num_groups > 1:
            keys = _within_groups(keys, num_groups, topk_group, group_score)
        ids = keys.argsort(dim=1, descending=True, stable=True)[:, :top_k]
    weights = scores.gather(1, ids)
    if renormalize:
        total = weights.sum(1, keepdim=True)
        weights = torch.where(total > 0, weights / total, weights)
    if scale_output:
        weights = weights * routed_scaling_factor
    weights_out[:, :top_k] = weights
    ids_out[:, :top_k] = ids
    # A shared expert counts once, whoever multiplies by the routed scaling factor later.
    weights_out[:, top_k:] = 1.0 if scale_output else 1.0 / routed_scaling_factor
    ids_out[:, top_k:] = torch.arange(E, E + num_shared, device=ids.device)
    weights_out[~real] = 0.0
    ids_out[~real] = -1


def _scores(logits: torch.Tensor, scoring: str, softcap: float | None) -> torch.Tensor:
    """Finite scores >= 0. A NaN logit scores 0; infinities act as the largest finite numbers."""
    nan = logits.isnan()
    x = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    largest = torch.finfo(torch.float32).max
    x = x.nan_to_num(-largest, largest, -largest)
    if scoring == "softmax":
        scores = torch.softmax(x, 1)
    elif scoring == "sigmoid":
        scores = 1.0 / (1.0 + torch.exp(-x))  # torch.sigmoid rounds equal logits differently in a vector's tail
    elif scoring == "sqrtsoftplus":
        scores = (x.clamp(min=0) + torch.log1p(torch.exp(-x.abs()))).sqrt()
    else:
        scores = torch.where(x > 20, x, torch.log1p(torch.exp(x.clamp(max=20)))).sqrt()
    return scores.masked_fill(nan, 0.0)


def _within_groups(keys: torch.Tensor, num_groups: int, topk_group: int, group_score: str) -> torch.Tensor:
    """Keys with every expert outside the best groups at -inf, below any key of a NaN-free expert inside."""
    grouped = keys.unflatten(1, (num_groups, -1))
    score = grouped.amax(2) if group_score == "max" else grouped.topk(2, dim=2).values.sum(2)
    best = score.argsort(dim=1, descending=True, stable=True)[:, :topk_group]
    kept = F.one_hot(best, num_groups).sum(1).bool()
    # An expert with a NaN logit in a kept group must still rank before every expert of a dropped group.
    inside = grouped.clamp(min=torch.finfo(torch.float32).min)
    return torch.where(kept[:, :, None], inside, float("-inf")).flatten(1)


def _look_up(table: torch.Tensor, token_ids: torch.Tensor, real: torch.Tensor, E: int) -> torch.Tensor:
    """The experts of the real rows' tokens. What padding rows hold does not matter."""
    vocabulary, rows = table.shape[0], real.nonzero().flatten()
    wrong = real & ((token_ids < 0) | (token_ids >= vocabulary))
    _refuse(wrong, token_ids, f"token_ids must be in [0, {vocabulary}), the rows of hash_table", "Mask padding first.")
    ids = table[token_ids[rows].long()].long()
    rule = f"the rows of hash_table in use must be expert ids in [0, {E})"
    _refuse((ids < 0) | (ids >= E), ids, rule, "The table is for another model.")
    return ids


def _refuse(wrong: torch.Tensor, ids: torch.Tensor, rule: str, fix: str) -> None:
    if wrong.any():
        index = tuple(int(i) for i in wrong.nonzero()[0])
        raise ValueError(f"topk: {rule}; got {int(ids[index])} at {index}. {fix}")
