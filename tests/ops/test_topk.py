"""moe::topk against a sort of Python floats, one token at a time."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_ops import topk
from moe_ops.backends import BACKENDS
from moe_ops.testing import assert_bits_equal

SWEEP = settings.get_profile("ops")

FP32 = 2e-6  # relative: some float32 roundings of exp, log1p, sum and division, at 2^-24 each
FLOOR = 1e-37  # below, float32 has no digits left
APART = 1e-6  # keys closer than this, relative, yet not equal, may rank either way in float32: such tokens are left out
SCORINGS = ("softmax", "sigmoid", "sqrtsoftplus", "sqrtsoftplus_log1p")
NAN, INF = float("nan"), float("inf")


def score_row(logits: list[float], scoring: str, softcap: float | None = None) -> list[float]:
    """The scores of one token; 0 for NaN."""
    x = [value if softcap is None else softcap * math.tanh(value / softcap) for value in logits]
    if scoring == "softmax":
        top = max((value for value in x if value == value), default=0.0)
        e = [math.exp(value - top) if value == value else 0.0 for value in x]
        return [value / (sum(e) or 1.0) for value in e]
    if scoring == "sigmoid":
        return [0.0 if value != value else 1 / (1 + math.exp(-value)) if value > -700 else 0.0 for value in x]
    return [0.0 if v != v else math.sqrt(max(v, 0.0) + math.log1p(math.exp(-abs(v)))) for v in x]


def ranked(keys: list[float]) -> list[int]:
    """Indices by falling key, the lowest index first among equals, NaN last."""
    return sorted(range(len(keys)), key=lambda i: (keys[i] != keys[i], -keys[i] if keys[i] == keys[i] else 0, i))


def choose(logits, scores, top_k, bias, num_groups=1, topk_group=1, group_score="top2") -> list[int] | None:
    """The experts of one token, best first; None if two keys are too close to call."""
    bias, size = bias or [0.0] * len(scores), len(scores) // num_groups
    keys = [NAN if x != x else s + b for x, s, b in zip(logits, scores, bias, strict=True)]
    groups = [keys[g * size : g * size + size] for g in range(num_groups)]
    best_two = [sorted((-INF if k != k else k for k in group), reverse=True)[:2] for group in groups]
    of_group = [two[0] if group_score == "max" else sum(two) for two in best_two]
    for values in (keys, of_group):
        values = sorted({value for value in values if abs(value) < INF})
        margin = APART * max(map(abs, (*values, *bias)), default=0.0)
        if any(b - a < max(margin, APART * b) for a, b in zip(values, values[1:], strict=False)):
            return None
    kept = ranked(of_group)[:topk_group]
    return [i for i in ranked(keys) if i // size in kept][:top_k]


def weigh(scores, ids, renormalize=True, factor=1.0) -> list[float]:
    chosen = [scores[i] for i in ids]
    total = sum(chosen)
    return [(w / total if renormalize and total > FLOOR else w) * factor for w in chosen]


def assert_row(weights, ids, want_weights, want_ids, case=""):
    assert ids.tolist() == want_ids, f"{case}: {ids.tolist()} instead of {want_ids}"
    for got, want in zip(weights.tolist(), want_weights, strict=True):
        assert abs(got - want) <= FP32 * want + FLOOR, f"{case}: {weights.tolist()} instead of {want_weights}"


FORMS = {
    "softmax": {},
    "raw": dict(renormalize=False),
    "softcap": dict(softcap=3.0),
    "sigmoid-bias": dict(scoring="sigmoid", bias=True),
    "sqrtsoftplus-bias": dict(scoring="sqrtsoftplus", bias=True, routed_scaling_factor=1.5, num_shared=1),
    "log1p": dict(scoring="sqrtsoftplus_log1p", scale_output=True, routed_scaling_factor=2.5),
    "top2-groups": dict(scoring="sigmoid", bias=True, num_groups=4, topk_group=2, num_shared=2),
    "max-groups": dict(num_groups=4, topk_group=2, group_score="max", renormalize=False),
    "hash": dict(scoring="sqrtsoftplus", hash=True, num_shared=1),
    "padded": dict(scoring="sigmoid", num_token_non_padded=True),
}


def build(
    T=7, E=16, top_k=4, *, dtype=torch.float32, seed=0, bias=False, hash=False, num_token_non_padded=False, **more
):
    """(logits, keyword arguments): logits on a grid, so that ties are exact and other keys lie apart."""
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randint(-48, 49, (T, E), generator=generator) / 8).to(dtype)
    if bias:
        more["bias"] = torch.randint(-8, 9, (E,), generator=generator) / 4
    if hash:
        table = torch.rand(11, E, generator=generator).argsort(1)[:, :top_k].int()
        more |= dict(hash_table=table, token_ids=torch.randint(0, 11, (T,), generator=generator))
    if num_token_non_padded:
        more["num_token_non_padded"] = torch.tensor(T // 2, dtype=torch.int32)
    return logits, dict(top_k=top_k, **more)


def judge(logits, *, top_k, scoring="softmax", softcap=None, renormalize=True, num_shared=0, **more):
    """(weights, ids) of each token, or None where two keys are too close to call."""
    factor, scaled = more.pop("routed_scaling_factor", 1.0), more.pop("scale_output", False)
    real = int(more.pop("num_token_non_padded", len(logits)))
    table, tokens = more.pop("hash_table", None), more.pop("token_ids", None)
    bias = more.pop("bias", None)
    bias = None if bias is None else bias.tolist()
    E = logits.shape[1]
    for t, row in enumerate(logits.double().tolist()):
        scores = score_row(row, scoring, softcap)
        if t >= real:
            yield [0.0] * (top_k + num_shared), [-1] * (top_k + num_shared)
            continue
        ids = choose(row, scores, top_k, bias, **more) if table is None else table[tokens[t]].tolist()
        if ids is None:
            yield None
            continue
        weights = weigh(scores, ids, renormalize, factor if scaled else 1.0)
        yield weights + [1.0 if scaled else 1.0 / factor] * num_shared, ids + list(range(E, E + num_shared))


def assert_right(logits, arguments):
    weights, ids = topk(logits, **arguments)
    left_out = 0
    for t, want in enumerate(judge(logits, **arguments)):
        if want is None:
            left_out += 1
        else:
            assert_row(weights[t], ids[t], *want, f"token {t}")
    assert left_out <= len(logits) // 4 + 1
    return weights, ids


@pytest.mark.parametrize("T", [0, 1, 5])
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_topk_meets_its_contract(form, T, meets_contract):
    logits, arguments = build(T, **form)
    width = arguments["top_k"] + arguments.get("num_shared", 0)
    wanted = (((T, width), torch.float32, (width, 1)), ((T, width), torch.int32, (width, 1)))
    meets_contract(torch.ops.moe.topk.default, wanted, logits, **arguments)
    meets_contract(torch.ops.moe.topk_ws.default, (), logits, ws=torch.zeros(1024, dtype=torch.uint8), **arguments)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_topk_matches_reference(form, dtype, packed_form_agrees):
    for seed in range(4):
        logits, arguments = build(9, 24, 3, dtype=dtype, seed=seed, **form)
        results = assert_right(logits, arguments)
        packed_form_agrees("topk", results, logits, **arguments)


@SWEEP
@given(
    T=st.integers(0, 5),
    groups=st.integers(1, 4),
    size=st.integers(2, 9),
    form=st.sampled_from([form for name, form in FORMS.items() if "groups" not in name]),
    group_score=st.sampled_from(("top2", "max")),
    data=st.data(),
)
def test_topk_matches_reference_sweep(T, groups, size, form, group_score, data):
    topk_group = data.draw(st.integers(1, groups), "topk_group")
    top_k = data.draw(st.integers(1, size * topk_group), "top_k")
    grouping = {}
    if not form.get("hash"):
        grouping = dict(num_groups=groups, topk_group=topk_group, group_score=group_score)
    logits, arguments = build(T, groups * size, top_k, seed=data.draw(st.integers(0, 999), "seed"), **form, **grouping)
    assert_right(logits, arguments)


@pytest.mark.parametrize("scoring", SCORINGS)
@pytest.mark.parametrize("E", [1, 7, 37, 256])
def test_topk_edges_ties_go_to_the_lowest_id(E, scoring):
    """Whatever the logit: a vectorised function may round the same number differently in its tail."""
    top_k = min(E, 6)
    for value in (torch.randn(100) * 4).tolist():
        weights, ids = topk(torch.full((3, E), value), top_k, scoring=scoring)
        assert (ids == torch.arange(top_k)).all(), value
        assert (weights == weights[:, :1]).all(), value


@pytest.mark.parametrize("scoring", SCORINGS)
def test_topk_edges_a_token_does_not_depend_on_its_batch(scoring):
    logits, bias = torch.randn(99, 37), torch.randn(37)
    weights, ids = topk(logits, 5, scoring=scoring, bias=bias)
    for t in range(99):
        alone_weights, alone_ids = topk(logits[t : t + 1], 5, scoring=scoring, bias=bias)
        assert_bits_equal(alone_weights, weights[t : t + 1])
        assert_bits_equal(alone_ids, ids[t : t + 1])


@pytest.mark.parametrize("num_groups", [1, 4], ids=["flat", "groups"])
@pytest.mark.parametrize("scoring", SCORINGS)
def test_topk_edges_nan_ranks_last_and_weighs_nothing(scoring, num_groups):
    logits = torch.arange(8.0).repeat(5, 1)
    logits[1, 7] = NAN
    logits[2, 2:] = NAN
    logits[3] = NAN
    logits[4, ::2] = NAN
    groups = dict(num_groups=num_groups, topk_group=num_groups)
    weights, ids = topk(logits, 4, scoring=scoring, **groups)
    assert ids.tolist() == [[7, 6, 5, 4], [6, 5, 4, 3], [1, 0, 2, 3], [0, 1, 2, 3], [7, 5, 3, 1]]
    assert weights.isfinite().all()
    assert (weights[2, 2:] == 0).all() and (weights[3] == 0).all()
    for row, total in enumerate([1, 1, 1, 0, 1]):
        assert abs(weights[row].sum().item() - total) <= FP32


def test_topk_edges_nan_ranks_last_whatever_its_bias():
    logits, bias = torch.tensor([[0.0, NAN, 1.0, NAN]]), torch.tensor([-3.0, 50.0, NAN, 50.0])
    weights, ids = topk(logits, 3, scoring="sigmoid", bias=bias)
    assert ids.tolist() == [[0, 1, 2]] and weights[0].isfinite().all()  # a NaN bias ranks last as well


def test_topk_edges_nan_in_a_kept_group_ranks_before_a_dropped_group():
    logits = torch.tensor([[1.0, 1.0, 1.0, 1.0, 9.0, 8.0, NAN, NAN]])
    weights, ids = topk(logits, 3, num_groups=2, topk_group=1)
    assert ids.tolist() == [[4, 5, 6]] and weights[0, 2] == 0
    ids = topk(logits[:, [6, 7, 6, 7, 0, 1, 2, 3]], 4, num_groups=2, topk_group=1)[1]  # a group of NaN is the worst
    assert ids.tolist() == [[4, 5, 6, 7]]


@pytest.mark.parametrize("scoring", SCORINGS)
def test_topk_edges_infinities(scoring):
    weights, ids = topk(torch.tensor([[0.0, INF, -INF, 1.0], [-INF] * 4, [INF] * 4]), 2, scoring=scoring)
    second = 0 if scoring == "softmax" else 3  # beside an infinity every softmax underflows to the same 0
    assert ids.tolist() == [[1, second], [0, 1], [0, 1]]
    assert weights.isfinite().all() and (weights[2] == 0.5).all()


@pytest.mark.parametrize("form", [{}, dict(num_groups=2, topk_group=1)], ids=["flat", "groups"])
@pytest.mark.parametrize("scoring", SCORINGS)
def test_topk_edges_underflow_does_not_become_nan(scoring, form):
    """Scores that vanish beside a correction bias: weights stay 0, or finite where the scoring has digits left."""
    for value in (-100.0, -104.0, -1e4, -3e38):
        weights, ids = topk(torch.full((3, 8), value), 4, scoring=scoring, bias=torch.full((8,), 11.2), **form)
        assert (ids == torch.arange(4)).all()
        assert weights.isfinite().all()
        total = weights.sum(1)
        assert ((total == 0) | ((total - 1).abs() <= FP32)).all()
    assert (total == (1.0 if scoring == "softmax" else 0.0)).all()


def test_topk_edges_bias_ranks_and_does_not_weigh():
    logits = torch.tensor([[0.0, 1.0, 2.0, 3.0]])
    weights, ids = topk(logits, 2, scoring="sigmoid", bias=torch.tensor([10.0, 0, 0, 0]), renormalize=False)
    assert ids.tolist() == [[0, 3]]
    assert_row(weights[0], ids[0], score_row([0.0, 3.0], "sigmoid"), [0, 3])


def test_topk_edges_bias_is_added_in_float32():
    assert topk(torch.zeros(1, 2).half(), 2, scoring="sigmoid", bias=torch.tensor([1, 1 + 2.0**-20]))[1].tolist() == [
        [1, 0]
    ]


def test_topk_edges_group_scores_differ():
    """One group holds the largest key, the other the largest pair."""
    logits = torch.tensor([[2.5, -3.0, 2.0, 2.0]])
    choices = {score: topk(logits, 2, num_groups=2, group_score=score)[1].tolist() for score in ("top2", "max")}
    assert choices == {"top2": [[2, 3]], "max": [[0, 1]]}
    twice = torch.tensor([[2.0, 2.0, 0.0, 2.5, 0.0, 1.0]])  # a maximum that occurs twice counts twice
    assert topk(twice, 3, scoring="sigmoid", num_groups=2)[1].tolist() == [[0, 1, 2]]


@pytest.mark.parametrize("factor", [1.0, 2.5])
@pytest.mark.parametrize("renormalize", [True, False], ids=["renormalized", "raw"])
def test_topk_edges_the_scaling_factor_has_one_owner(factor, renormalize):
    """Whoever multiplies, routed weights end up scaled by exactly the factor, and a shared expert counts once."""
    logits, form = torch.randn(5, 8), dict(num_shared=2, renormalize=renormalize)
    plain = topk(logits, 3, **form)[0]
    here = topk(logits, 3, routed_scaling_factor=factor, scale_output=True, **form)[0]
    later = topk(logits, 3, routed_scaling_factor=factor, **form)[0]
    assert_bits_equal(here[:, :3], plain[:, :3] * factor)
    assert_bits_equal(later[:, :3], plain[:, :3])
    assert (here[:, 3:] == 1.0).all() and ((later[:, 3:] * factor - 1.0).abs() <= FP32).all()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=lambda d: str(d)[6:])
def test_topk_edges_padding_rows_choose_nobody(dtype):
    logits = torch.zeros(256, 8)
    logits[:8] = torch.randn(8, 8)
    full = topk(logits, 2, num_shared=1)
    for count in (0, 8, 256, 1000):
        weights, ids = topk(logits, 2, num_shared=1, num_token_non_padded=torch.tensor([count], dtype=dtype))
        assert_bits_equal(weights[:count], full[0][:count])
        assert_bits_equal(ids[:count], full[1][:count])
        assert (ids[count:] == -1).all() and (weights[count:] == 0).all()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=lambda d: str(d)[6:])
def test_topk_edges_hash_ignores_the_token_ids_of_padding_rows(dtype):
    logits, table = torch.randn(4, 8), torch.tensor([[7, 0], [3, 3]], dtype=dtype)
    table = torch.cat((table, torch.tensor([[99, -5]], dtype=dtype)))  # a bad row that no real token uses
    tokens = torch.tensor([1, 0, -1, 2], dtype=dtype)
    weights, ids = topk(logits, 2, hash_table=table, token_ids=tokens, num_token_non_padded=torch.tensor(2))
    assert ids.tolist() == [[3, 3], [7, 0], [-1, -1], [-1, -1]]
    assert weights[0].tolist() == [0.5, 0.5] and (weights[2:] == 0).all()


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_topk_touches_nothing_else(form, unchanged, packed_form_agrees):
    """Two different routings through one workspace, whatever it held."""
    for seed in (0, 1):
        logits, arguments = build(seed=seed, **form)
        with unchanged(logits, *(value for value in arguments.values() if isinstance(value, torch.Tensor))):
            packed_form_agrees("topk", topk(logits, **arguments), logits, **arguments)


L, IDS, TABLE = torch.zeros(3, 8), torch.zeros(3, dtype=torch.int64), torch.zeros(5, 2, dtype=torch.int32)
HASH = dict(hash_table=TABLE, token_ids=IDS)
TOGETHER = "Hash routing looks the experts of a token id up; pass both or neither."
ALONE = "The table fixes the experts, so nothing is left to rank."
ONE_OF, MOVE = "Choose one of them.", "Move it with .to('cpu')."
OTHER = "The table is for another model."
VALUE_ERRORS = {
    "logits must be of shape (T, E); got (8,). Flatten the tokens.": dict(logits=L[0]),
    f"scoring must be one of {', '.join(SCORINGS)}; got 'relu'. {ONE_OF}": dict(scoring="relu"),
    "top_k must be between 1 and the number of experts 8; got 9. Lower it.": dict(top_k=9),
    "top_k must be between 1 and the number of experts 8; got 0. Lower it.": dict(top_k=0),
    "num_shared must be at least 0; got -1. It counts shared-expert slots.": dict(num_shared=-1),
    "softcap must be positive; got 0.0. Pass None for no cap.": dict(softcap=0.0),
    "routed_scaling_factor must be positive; got 0.0. 1.0 changes nothing.": dict(routed_scaling_factor=0.0),
    "bias must be of shape (E,) = (8,); got (7,). One value per expert.": dict(bias=L[0, :7]),
    "bias must be of shape (E,) = (8,); got (3, 8). One value per expert.": dict(bias=L),
    f"group_score must be one of top2, max; got 'sum'. {ONE_OF}": dict(group_score="sum"),
    "num_groups must be at least 1; got 0. 1 means ungrouped.": dict(num_groups=0),
    "the number of experts must be a multiple of 3; got 8. Groups are equal runs of experts.": dict(num_groups=3),
    "topk_group must be between 1 and num_groups=2; got 3. It counts the groups a token may use.": dict(
        num_groups=2, topk_group=3
    ),
    "top_k must be at most the 2 experts of topk_group=1 groups; got 3. Raise topk_group.": dict(num_groups=4, top_k=3),
    "group_score must be max for groups of one expert; got 'top2'. Pass group_score='max'.": dict(
        num_groups=8, topk_group=2
    ),
    f"hash_table must be given together with token_ids; got only one of them. {TOGETHER}": dict(hash_table=TABLE),
    f"hash_table must be used without bias and groups; got one of these. {ALONE}": dict(bias=L[0], **HASH),
    "hash_table must be of shape (vocabulary, top_k) = (any, 2); got (5, 1). One row per token id.": dict(
        hash_table=TABLE[:, :1], token_ids=IDS
    ),
    "token_ids must be of shape (T,) = (3,); got (2,). One id per row of logits.": dict(
        hash_table=TABLE, token_ids=IDS[:2]
    ),
    "token_ids must be in [0, 5), the rows of hash_table; got 5 at (1,). Mask padding first.": dict(
        hash_table=TABLE, token_ids=torch.tensor([0, 5, 0])
    ),
    "token_ids must be in [0, 5), the rows of hash_table; got -1 at (2,). Mask padding first.": dict(
        hash_table=TABLE, token_ids=torch.tensor([0, 0, -1])
    ),
    f"the rows of hash_table in use must be expert ids in [0, 8); got 8 at (0, 0). {OTHER}": dict(
        hash_table=TABLE + 8, token_ids=IDS
    ),
    "num_token_non_padded must be a tensor of one element; got (3,). It counts the real rows at the front.": dict(
        num_token_non_padded=IDS
    ),
    f"bias must be on cpu; got meta. {MOVE}": dict(bias=L[0].to("meta")),
    f"hash_table must be on cpu; got meta. {MOVE}": dict(hash_table=TABLE.to("meta"), token_ids=IDS),
    f"token_ids must be on cpu; got meta. {MOVE}": dict(hash_table=TABLE, token_ids=IDS.to("meta")),
    f"num_token_non_padded must be on cpu; got meta. {MOVE}": dict(num_token_non_padded=IDS[:1].to("meta")),
    f"backend must be one of {', '.join(BACKENDS)}; got 'cuda'. {ONE_OF}": dict(backend="cuda"),
}
TYPE_ERRORS = {
    "logits must be bfloat16 or float16 or float32; got int32. Cast them first.": dict(logits=L.int()),
    "bias must be bfloat16 or float16 or float32; got int32. Cast it first.": dict(bias=L[0].int()),
    "hash_table must be int32 or int64; got float32. It holds expert ids.": dict(
        hash_table=TABLE.float(), token_ids=IDS
    ),
    "token_ids must be int32 or int64; got float32. It holds token ids.": dict(hash_table=TABLE, token_ids=IDS.float()),
    "num_token_non_padded must be int32 or int64; got float32. Cast it first.": dict(
        num_token_non_padded=torch.tensor(3.0)
    ),
}
REFUSED = [
    pytest.param(kind, sentence, bad, id=sentence.split(";")[0])
    for kind, table in ((ValueError, VALUE_ERRORS), (TypeError, TYPE_ERRORS))
    for sentence, bad in table.items()
]


@pytest.mark.parametrize("kind, sentence, bad", REFUSED)
def test_topk_explains_itself(kind, sentence, bad, says):
    with says(kind, f"topk: {sentence}"):
        topk(**{"logits": L, "top_k": 2, **bad})


@pytest.mark.parametrize("bad", [dict(token_ids=IDS), dict(num_groups=2, **HASH)], ids=["tokens-alone", "groups"])
def test_topk_explains_itself_about_hash_routing(bad, says):
    rule = f"given together with token_ids; got only one of them. {TOGETHER}"
    if "num_groups" in bad:
        rule = f"used without bias and groups; got one of these. {ALONE}"
    with says(ValueError, f"topk: hash_table must be {rule}"):
        topk(L, 2, **bad)


@pytest.mark.parametrize("name", ["logits", "bias"])
def test_topk_explains_itself_about_gradients(name, refuses_gradients):
    refuses_gradients("topk", topk, dict(logits=L, top_k=2, bias=L[0]), name)
