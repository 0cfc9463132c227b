"""Triton kernel of moe::topk."""

import triton
import triton.language as tl

from moe_ops.kernels.launch import jit
from moe_ops.kernels.numeric import sigmoid, softplus, tanh

_INF = tl.constexpr(float("inf"))
_LARGEST = tl.constexpr(3.4028234663852886e38)
_TAKEN = tl.constexpr(-(2**31))  # below the order of every float


# float32 -> int32 of the same order, so that something can lie below -inf. No NaN; -0 equals 0.
@jit
def _ordered(key):
    bits = (key + 0.0).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


# The largest entry of an (N,) order, the lowest index among equals, and the order without it.
@jit
def _take_best(order, index, N: tl.constexpr):
    best = tl.min(tl.where(order == tl.max(order, 0), index, N), 0)
    return best, tl.where(index == best, _TAKEN, order)


# Scores of (GROUPS, SIZE) logits, float32: finite, at least 0, and 0 for NaN. `real` marks experts that exist.
@jit
def _scores(logits, real, softcap, SCORING: tl.constexpr, HAS_SOFTCAP: tl.constexpr):
    x = logits
    if HAS_SOFTCAP:
        x = softcap * tanh(x / softcap)
    x = tl.where(x != x, -_LARGEST, tl.where(x > _LARGEST, _LARGEST, tl.where(x < -_LARGEST, -_LARGEST, x)))
    if SCORING == "softmax":
        e = tl.where(real, tl.exp(x - tl.max(tl.max(tl.where(real, x, -_INF), 1), 0)), 0.0)
        scores = tl.div_rn(e, tl.sum(tl.sum(e, 1), 0))
    elif SCORING == "sigmoid":
        scores = sigmoid(x)
    else:
        scores = tl.sqrt_rn(softplus(x))
    return tl.where(logits != logits, 0.0, scores)


# (GROUPS, SIZE) keys with every expert outside the topk_group best groups at -inf. A NaN inside (-inf) still ranks
# before those.
@jit
def _within_groups(keys, real, num_groups, topk_group, GROUPS: tl.constexpr, SIZE: tl.constexpr, TOP2: tl.constexpr):
    score = tl.max(keys, 1)
    if TOP2:
        column = tl.arange(0, SIZE)[None, :]
        first = tl.min(tl.where(keys == score[:, None], column, SIZE), 1)
        score += tl.max(tl.where(column == first[:, None], -_INF, keys), 1)
    group = tl.arange(0, GROUPS)
    order = tl.where(group < num_groups, _ordered(score), _TAKEN)
    kept = tl.zeros((GROUPS,), tl.int32)
    for _ in range(topk_group):
        best, order = _take_best(order, group, GROUPS)
        kept |= (group == best).to(tl.int32)
    return tl.where((kept[:, None] != 0) & real, tl.maximum(keys, -_LARGEST), -_INF)


# One token in one warp: scores of all experts, then its routes one after another. Grid (tokens,).
@jit
def _topk_kernel(
    logits_ptr, stride_lt, stride_le,
    bias_ptr, stride_b,
    table_ptr, stride_tv, stride_tj,
    token_ids_ptr, stride_t,
    padded_ptr,
    weights_ptr, ids_ptr,
    E, vocabulary, num_groups, topk_group, softcap, factor, shared_weight,
    TOP_K: tl.constexpr, SHARED: tl.constexpr, WIDTH: tl.constexpr, GROUPS: tl.constexpr, SIZE: tl.constexpr,
    SCORING: tl.constexpr, HAS_SOFTCAP: tl.constexpr, RENORMALIZE: tl.constexpr, TOP2: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    size = E // num_groups
    group = tl.arange(0, GROUPS)[:, None]
    column = tl.arange(0, SIZE)[None, :]
    real = (group < num_groups) & (column < size)
    expert = group * size + column
    logits = tl.load(logits_ptr + token * stride_lt + expert.to(tl.int64) * stride_le, mask=real, other=0.0)
    logits = logits.to(tl.float32)
    scores = _scores(logits, real, softcap, SCORING, HAS_SOFTCAP)
    slot = tl.arange(0, WIDTH)
    weights = tl.zeros((WIDTH,), tl.float32)
    ids = tl.full((WIDTH,), -1, tl.int32)
    if table_ptr is not None:
        word = tl.load(token_ids_ptr + token * stride_t).to(tl.int64)
        known = (word >= 0) & (word < vocabulary)
        for route in range(TOP_K):
            chosen = tl.load(table_ptr + word * stride_tv + route * stride_tj, mask=known, other=-1).to(tl.int32)
            # An id that no expert has leaves its slot at -1 and 0, and reads nothing.
            weight = tl.sum(tl.sum(tl.where(real & (expert == chosen), scores, 0.0), 1), 0)
            weights = tl.where(slot == route, weight, weights)
            ids = tl.where((slot == route) & (chosen >= 0) & (chosen < E), chosen, ids)
    else:
        keys = scores
        if bias_ptr is not None:
            keys += tl.load(bias_ptr + expert.to(tl.int64) * stride_b, mask=real, other=0.0).to(tl.float32)
        keys = tl.where(real & (logits == logits) & (keys == keys), keys, -_INF)
        if GROUPS > 1:
            keys = _within_groups(keys, real, num_groups, topk_group, GROUPS, SIZE, TOP2)
        order = tl.reshape(tl.where(real, _ordered(keys), _TAKEN), (GROUPS * SIZE,))
        place = tl.arange(0, GROUPS * SIZE)
        flat = tl.reshape(scores, (GROUPS * SIZE,))
        for route in range(TOP_K):
            best, order = _take_best(order, place, GROUPS * SIZE)
            weights = tl.where(slot == route, tl.sum(tl.where(place == best, flat, 0.0), 0), weights)
            ids = tl.where(slot == route, best // SIZE * size + best % SIZE, ids)
    if RENORMALIZE:
        total = tl.sum(weights, 0)
        weights = tl.div_rn(weights, tl.where(total > 0.0, total, 1.0))
    weights = weights * factor
    shared = (slot >= TOP_K) & (slot < TOP_K + SHARED)
    weights = tl.where(shared, shared_weight, weights)
    ids = tl.where(shared, E + slot - TOP_K, ids)
    if padded_ptr is not None:
        padding = token >= tl.load(padded_ptr)
        weights = tl.where(padding, 0.0, weights)
        ids = tl.where(padding, -1, ids)
    out = token * (TOP_K + SHARED) + slot
    tl.store(weights_ptr + out, weights, mask=slot < TOP_K + SHARED)
    tl.store(ids_ptr + out, ids, mask=slot < TOP_K + SHARED)


def topk(
    outputs, *, logits, top_k, scoring, bias, softcap, renormalize, num_groups, topk_group, group_score,
    routed_scaling_factor, scale_output, num_shared, hash_table, token_ids, num_token_non_padded,
) -> None:  # fmt: skip
    """moe::topk. A hash table's wrong ids, which the reference refuses, leave their slots at -1 with weight 0."""
    T, E = logits.shape
    table = (None, 0, 0) if hash_table is None else (hash_table, *hash_table.stride())
    tokens = (None, 0) if token_ids is None else (token_ids, *token_ids.stride())
    _topk_kernel[(T,)](
        logits, *logits.stride(),
        *((None, 0) if bias is None else (bias, *bias.stride())),
        *table, *tokens,
        num_token_non_padded,
        *outputs,
        E, 0 if hash_table is None else len(hash_table), num_groups, topk_group, softcap or 0.0,
        routed_scaling_factor if scale_output else 1.0,
        1.0 if scale_output else 1.0 / routed_scaling_factor,
        TOP_K=top_k, SHARED=num_shared, WIDTH=triton.next_power_of_2(top_k + num_shared),
        GROUPS=triton.next_power_of_2(num_groups), SIZE=triton.next_power_of_2(E // num_groups),
        SCORING=scoring.removesuffix("_log1p"),  # the same function: above 20 a float32 softplus is its argument
        HAS_SOFTCAP=softcap is not None, RENORMALIZE=renormalize, TOP2=group_score == "top2",
        num_warps=1,
    )  # fmt: skip
