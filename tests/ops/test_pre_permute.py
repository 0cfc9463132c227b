"""moe::pre_permute_{contiguous,masked} against lists of tokens per expert, and moe::pre_permute_ws against both."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_ops import pre_permute_contiguous, pre_permute_masked, quantize
from moe_ops.backends import BACKENDS
from moe_ops.recipes import RECIPES
from moe_ops.testing import FORMS, PATTERNS, assert_bits_equal, random_routing
from moe_ops.testing.cases import DISTRIBUTIONS
from moe_ops.testing.decode import decode_words

SWEEP = settings.get_profile("ops")

FP32 = 2.0**-23  # one float32 step, relative: the two roundings of amax * (1 / 448)
BLOCK = 128
OPS = {"contiguous": pre_permute_contiguous, "masked": pre_permute_masked}
each_format = pytest.mark.parametrize("recipe, scale_format", FORMS, ids=["-".join(form) for form in FORMS])
each_layout = pytest.mark.parametrize("layout", OPS)


def up(rows: int) -> int:
    return -(-rows // BLOCK) * BLOCK


def tokens(T, K, seed=0, dtype=torch.bfloat16) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(T, K, generator=generator) * 2.0 ** torch.randint(-9, 9, (T, 1), generator=generator)).to(dtype)


def routing(T, E, top_k, distribution="uniform", seed=0) -> torch.Tensor:
    return random_routing(T, E, top_k, distribution, torch.Generator().manual_seed(seed))[1]


def lists(ids: torch.Tensor, E: int, expert_start: int) -> list[list[int]]:
    """Tokens of each local expert: in source order, each once."""
    chosen = [[] for _ in range(E)]
    for t, row in enumerate(ids.tolist()):
        for expert in row:
            local = expert - expert_start
            if expert >= 0 and 0 <= local < E and t not in chosen[local]:
                chosen[local].append(t)
    return chosen


def worst_case(T: int, top_k: int, E: int) -> int:
    """Most rows over all routings, by trying every number of blocks per expert."""
    most, routes = 0, T * min(top_k, E)
    for blocks in itertools.product(range(up(T) // BLOCK + 1), repeat=E):
        if sum(BLOCK * (b - 1) + 1 for b in blocks if b) <= routes:
            most = max(most, sum(blocks))
    return most * BLOCK


def starts_of(chosen: list[list[int]], layout: str, T: int) -> list[int]:
    starts, end = [], 0
    for members in chosen:
        starts.append(end)
        end += up(len(members)) if layout == "contiguous" else up(T)
    return starts


def assert_row_map(results, ids, layout, E, expert_start=0):
    """m_indices or masked_m, and src2dst; returns (row, token) of every row that a route owns."""
    T = len(ids)
    chosen = lists(ids, E, expert_start)
    starts = starts_of(chosen, layout, T)
    if layout == "contiguous":
        m_indices = [-1] * results[0].shape[0]
        for expert, members in enumerate(chosen):
            m_indices[starts[expert] : starts[expert] + len(members)] = [expert] * len(members)
        assert results[2].tolist() == m_indices
    else:
        assert results[2].tolist() == [len(members) for members in chosen]
    for t, row in enumerate(ids.tolist()):
        for j, expert in enumerate(row):
            local, got = expert - expert_start, results[3][t, j].item()
            here = expert >= 0 and 0 <= local < E
            assert got == (starts[local] + chosen[local].index(t) if here else -1), f"src2dst[{t}, {j}] is {got}"
    return [(start + i, t) for start, who in zip(starts, chosen, strict=True) for i, t in enumerate(who)]


def assert_rows(results, x, owned, recipe, nearest, integers):
    """Every owned row is its token, quantised; every other row is 0."""
    row, (x_q, x_scale) = RECIPES[recipe], results[:2]
    flat = integers(x_q.flatten(0, -2))
    free = torch.ones(len(flat), dtype=torch.bool)
    if owned:
        index, token = map(torch.tensor, zip(*owned, strict=True))
        free[index] = False
    assert (flat[free] == 0).all(), "a padding row is not 0"
    if not row.quantised:
        assert x_scale.numel() == 0
    if not owned:
        return
    if not row.quantised:
        assert_bits_equal(flat[index], integers(x.to(torch.bfloat16))[token])
        return
    groups = x.shape[1] // row.x_group
    scale = decode_words(x_scale, groups) if x_scale.dtype == torch.int32 else x_scale.double()
    scale = scale.flatten(0, -2)[index]
    amax = x[token].double().abs().unflatten(-1, (groups, -1)).amax(-1)
    if x_scale.dtype == torch.int32:
        by_rule = torch.tensor([[2.0 ** (nearest.exponent(a, 448.0) - 127) for a in r] for r in amax.tolist()])
        assert (scale == by_rule).all()
    else:
        by_rule = amax.clamp(min=1e-10) / 448.0
        assert ((scale - by_rule).abs() <= FP32 * by_rule).all()
    quotient = (x[token].double() / scale.repeat_interleave(row.x_group, 1)).float()
    assert ((flat[index].long() & 255) == nearest.e4m3(quotient.double())).all()


def shapes(layout, T, top_k, E, K, recipe, scale_format):
    """What the docstrings promise: (shape, dtype, stride) of each result."""
    row = RECIPES[recipe]
    M = worst_case(T, top_k, E) if layout == "contiguous" else up(T)
    batch = () if layout == "contiguous" else (E,)
    x_q = ((*batch, M, K), row.x_dtype, (*(M * K for _ in batch), K, 1))
    if scale_format == "none":
        x_scale = ((0,), torch.float32, (1,))
    else:
        G = K // row.x_group
        width, dtype = (G, torch.float32) if scale_format == "fp32" else (-(-G // 4), torch.int32)
        x_scale = ((*batch, M, width), dtype, (*(M * width for _ in batch), 1, M))
    row_map = ((M,) if layout == "contiguous" else (E,), torch.int32, (1,))
    return x_q, x_scale, row_map, ((T, top_k), torch.int32, (top_k, 1))


@pytest.mark.parametrize("T", [0, 5])
@each_layout
@each_format
def test_pre_permute_meets_its_contract(recipe, scale_format, layout, T, arena, meets_contract):
    x, ids, E, K = tokens(T, 640), routing(T, 3, 2), 3, 640
    op = getattr(torch.ops.moe, f"pre_permute_{layout}").default
    form = dict(recipe=recipe, scale_format=scale_format)
    meets_contract(op, shapes(layout, T, 2, E, K, **form), x, ids, num_local_experts=E, **form)
    space = arena(T=T, top_k=2, E=E, K=K, I=128, **form, layout=layout)
    meets_contract(torch.ops.moe.pre_permute_ws.default, (), x, ids, 0, **space.sizes, ws=space.ws)


@pytest.mark.parametrize("E, top_k", [(1, 1), (2, 1), (3, 2), (3, 5)])
@pytest.mark.parametrize("T", [0, 1, 2, 127, 128, 129, 257])
def test_pre_permute_meets_its_contract_with_the_exact_worst_case(T, E, top_k):
    M = pre_permute_contiguous(
        tokens(T, 8), routing(T, E, min(top_k, E)), num_local_experts=E, recipe="bf16", scale_format="none"
    )[2].numel()
    assert M == worst_case(T, top_k, E)


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@each_layout
@each_format
def test_pre_permute_matches_reference(recipe, scale_format, layout, distribution, nearest, integers):
    x, ids = tokens(19, 640), routing(19, 5, 3, distribution)
    results = OPS[layout](x, ids, num_local_experts=5, recipe=recipe, scale_format=scale_format)
    assert_rows(results, x, assert_row_map(results, ids, layout, 5), recipe, nearest, integers)


@SWEEP
@given(
    T=st.sampled_from((0, 1, 2, 31, 130)),
    E=st.integers(1, 6),
    top_k=st.integers(1, 4),
    K=st.sampled_from((128, 384, 1024)),
    form=st.sampled_from(FORMS),
    layout=st.sampled_from(tuple(OPS)),
    distribution=st.sampled_from(DISTRIBUTIONS[1:]),  # these also fill more columns than there are experts
    expert_start=st.integers(0, 3),
    dtype=st.sampled_from((torch.int32, torch.int64)),
)
def test_pre_permute_matches_reference_sweep(
    T, E, top_k, K, form, layout, distribution, expert_start, dtype, nearest, integers
):
    x, ids = tokens(T, K), routing(T, E, top_k, distribution).to(dtype)
    place = dict(num_local_experts=E, expert_start=expert_start)
    results = OPS[layout](x, ids, recipe=form[0], scale_format=form[1], **place)
    assert_rows(results, x, assert_row_map(results, ids, layout, E, expert_start), form[0], nearest, integers)


@pytest.mark.parametrize("distribution", ["uniform", "repeated", "foreign"])
@each_layout
@each_format
def test_pre_permute_ws_matches_the_functional_form(recipe, scale_format, layout, distribution, arena, integers):
    x, ids, form = tokens(21, 640), routing(21, 4, 2, distribution), dict(recipe=recipe, scale_format=scale_format)
    results = OPS[layout](x, ids, num_local_experts=4, expert_start=1, **form)
    space = arena(T=21, top_k=2, E=4, K=640, I=128, **form, layout=layout)
    torch.ops.moe.pre_permute_ws(space.ws, x, ids, 1, **space.sizes)
    row_map = "m_indices" if layout == "contiguous" else "masked_m"
    assert_bits_equal(space[row_map], results[2])
    assert_bits_equal(space["src2dst"], results[3])
    valid = valid_rows(layout, results)
    assert_bits_equal(integers(space["x_q"])[valid], integers(results[0])[valid])
    if scale_format != "none":
        assert_bits_equal(space["x_scale"][valid], results[1][valid])


def valid_rows(layout, results) -> torch.Tensor:
    """Mask of the rows that routes own."""
    if layout == "contiguous":
        return results[2] >= 0
    return torch.arange(results[0].shape[1]) < results[2][:, None]


@pytest.mark.parametrize("expert_start", [0, 4], ids=["rank0", "rank1"])
@each_layout
def test_pre_permute_edges_ids_of_other_ranks_get_no_row(layout, expert_start):
    ids = torch.tensor([[0, 5], [-1, 4], [7, 3], [-1, -1], [8, 2**31 - 1]], dtype=torch.int32)
    results = OPS[layout](
        tokens(5, 8), ids, num_local_experts=4, recipe="bf16", scale_format="none", expert_start=expert_start
    )
    assert_row_map(results, ids, layout, 4, expert_start)
    foreign = OPS[layout](
        tokens(5, 8), ids * 0 + 9, num_local_experts=4, recipe="bf16", scale_format="none", expert_start=expert_start
    )
    assert (foreign[3] == -1).all() and not valid_rows(layout, foreign).any() and (foreign[0] == 0).all()


@each_layout
def test_pre_permute_edges_minus_one_does_not_wrap(layout):
    ids = torch.tensor([[-1, 0], [-4, -1]], dtype=torch.int32)
    for expert_start in (0, 1):  # with an offset, -1 must not become a local id either
        results = OPS[layout](
            tokens(2, 8), ids, num_local_experts=3, recipe="bf16", scale_format="none", expert_start=expert_start
        )
        assert results[3].tolist() == [[-1, -1 if expert_start else 0], [-1, -1]]


@pytest.mark.parametrize("huge", [2**32, 2**32 + 1, 2**62, -(2**32), -(2**63)], ids=str)
@each_layout
def test_pre_permute_edges_int64_ids_are_not_truncated(layout, huge):
    ids = torch.tensor([[huge, 1]])
    results = OPS[layout](tokens(1, 8), ids, num_local_experts=4, recipe="bf16", scale_format="none")
    assert results[3].tolist() == [[-1, 0 if layout == "contiguous" else BLOCK]]


@each_layout
def test_pre_permute_edges_an_expert_named_twice_gets_one_row(layout):
    ids = torch.tensor([[3, 3, 1], [0, 3, 0], [2, 2, 2]], dtype=torch.int32)
    results = OPS[layout](tokens(3, 8), ids, num_local_experts=4, recipe="bf16", scale_format="none")
    assert len(assert_row_map(results, ids, layout, 4)) == 5
    assert all(row[0] == row[k] for row, k in zip(results[3].tolist(), (1, 2, 1), strict=True))


@pytest.mark.parametrize("T", [127, 128, 129, 300])
@each_layout
def test_pre_permute_edges_one_expert_takes_all(layout, T):
    """Every column names it: the capacity must cover T rows, not T * top_k."""
    ids = torch.full((T, 4), 2, dtype=torch.int64)
    results = OPS[layout](tokens(T, 8), ids, num_local_experts=4, recipe="bf16", scale_format="none")
    assert len(assert_row_map(results, ids, layout, 4)) == T


@pytest.mark.parametrize("K", [128, 384, 512, 640, 1024], ids="K{}".format)
@each_layout
def test_pre_permute_edges_packed_width(layout, K, nearest, integers):
    """Widths 1 and 2, with and without missing bytes; the missing bytes are 0."""
    x, ids = tokens(3, K), routing(3, 2, 1)
    results = OPS[layout](x, ids, num_local_experts=2, recipe="fp8_block", scale_format="ue8m0")
    assert_rows(results, x, assert_row_map(results, ids, layout, 2), "fp8_block", nearest, integers)
    width, missing = results[1].shape[-1], -K // 128 % 4
    assert width == -(-K // 512)
    assert missing == 0 or (results[1][..., -1] >> 8 * (4 - missing) & 2 ** (8 * missing) - 1 == 0).all()


@each_format
def test_pre_permute_edges_zero_rows_and_values_that_are_not_finite(recipe, scale_format, integers):
    x = tokens(4, 256)
    x[0], x[1, 5], x[2, 7], x[3, 128:] = 0.0, float("nan"), float("inf"), 0.0
    ids = torch.zeros(4, 1, dtype=torch.int32)
    form = dict(recipe=recipe, scale_format=scale_format)
    x_q, x_scale = pre_permute_contiguous(x, ids, num_local_experts=1, **form)[:2]
    want = (x, None)
    if RECIPES[recipe].quantised:
        want = quantize(x, group=RECIPES[recipe].x_group, scale_format=scale_format)
        assert_bits_equal(x_scale[:4], want[1])
    assert_bits_equal(integers(x_q[:4]), integers(want[0]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=lambda d: str(d)[6:])
@each_format
def test_pre_permute_edges_token_dtypes(recipe, scale_format, dtype, nearest, integers):
    """fp16 with a tiny amax: the multiplier of its group does not fit fp16."""
    x, ids = (tokens(5, 256).float() * 1e-5).to(dtype), routing(5, 2, 1)
    results = pre_permute_masked(x, ids, num_local_experts=2, recipe=recipe, scale_format=scale_format)
    assert_rows(results, x, assert_row_map(results, ids, "masked", 2), recipe, nearest, integers)


@each_layout
def test_pre_permute_edges_strided_inputs(layout):
    x, ids, form = tokens(6, 256), routing(6, 4, 2), dict(num_local_experts=4, recipe="mxfp8", scale_format="ue8m0")
    want = OPS[layout](x, ids, **form)
    got = OPS[layout](x.T.contiguous().T, ids.T.contiguous().T, **form)
    for index, (a, b) in enumerate(zip(got, want, strict=True)):
        assert_bits_equal(a, b, f"result {index}")


@pytest.mark.parametrize("pattern", PATTERNS, ids=hex)
@each_layout
@each_format
def test_pre_permute_touches_nothing_else(recipe, scale_format, layout, pattern, arena, unchanged, integers):
    """Two different routings through one arena: each writes its rows and the whole row maps, and no other byte."""
    x, form = tokens(9, 640), dict(recipe=recipe, scale_format=scale_format)
    space = arena(pattern, T=9, top_k=2, E=4, K=640, I=128, **form, layout=layout)
    row_map = "m_indices" if layout == "contiguous" else "masked_m"
    for distribution in ("uniform", "one_expert", "foreign", "every_other"):
        ids = routing(9, 4, 2, distribution)
        with unchanged(x, ids):
            results = OPS[layout](x, ids, num_local_experts=4, **form)
            valid = valid_rows(layout, results)
            rows = dict(x_q=valid, x_scale=valid) if scale_format != "none" else dict(x_q=valid)
            if layout == "contiguous":
                rows["ends"] = slice(None)
            with space.writes_only(**rows, **{row_map: slice(None), "src2dst": slice(None)}):
                torch.ops.moe.pre_permute_ws(space.ws, x, ids, 0, **space.sizes)
        assert_bits_equal(space[row_map], results[2])
        assert_bits_equal(space["src2dst"], results[3])
        assert_bits_equal(integers(space["x_q"])[valid], integers(results[0])[valid])


X, IDS = torch.zeros(3, 256), torch.zeros(3, 2, dtype=torch.int32)
ONE_OF, MOVE = "Choose one of them.", "Move it with .to('cpu')."
VALUE_ERRORS = {
    "hidden_states must be of shape (T, K); got (3, 2, 128). Flatten batch and sequence into tokens.": dict(
        hidden_states=X.view(3, 2, 128)
    ),
    "topk_ids must be of shape (T, top_k); got (3,). Unsqueeze them.": dict(topk_ids=IDS[:, 0]),
    "topk_ids must be of shape (T, top_k) = (3, any); got (2, 2). One row per token.": dict(topk_ids=IDS[:2]),
    "topk_ids must be of at least one column; got 0. A token needs a route.": dict(topk_ids=IDS[:, :0]),
    f"topk_ids must be on cpu; got meta. {MOVE}": dict(topk_ids=IDS.to("meta")),
    "K, the last axis of hidden_states, must be a multiple of 128; got 48. Pad hidden_states and w13 with zeros.": dict(
        hidden_states=X[:, :48]
    ),
    "K, the last axis of hidden_states, must be a multiple of 32; got 48. Pad hidden_states and w13 with zeros.": dict(
        hidden_states=X[:, :48], recipe="mxfp8", scale_format="ue8m0"
    ),
    "num_local_experts must be at least 1; got 0. It is w13.shape[0].": dict(num_local_experts=0),
    "expert_start must be at least 0; got -1. It is this rank's first expert id.": dict(expert_start=-1),
    f"recipe must be one of bf16, fp8_block, mxfp8, mxfp4; got 'int8'. {ONE_OF}": dict(recipe="int8"),
    "scale_format must be one of ue8m0; got 'fp32'. These are the formats of recipe mxfp4.": dict(recipe="mxfp4"),
    "scale_format must be one of none; got 'fp32'. These are the formats of recipe bf16.": dict(recipe="bf16"),
    f"backend must be one of {', '.join(BACKENDS)}; got 'cuda'. {ONE_OF}": dict(backend="cuda"),
}
TYPE_ERRORS = {
    "hidden_states must be bfloat16 or float16 or float32; got float64. Cast them first.": dict(
        hidden_states=X.double()
    ),
    "topk_ids must be int32 or int64; got float32. Use topk_ids.int().": dict(topk_ids=IDS.float()),
}
REFUSED = [
    pytest.param(kind, sentence, bad, id=sentence.split(";")[0])
    for kind, table in ((ValueError, VALUE_ERRORS), (TypeError, TYPE_ERRORS))
    for sentence, bad in table.items()
]


@pytest.mark.parametrize("kind, sentence, bad", REFUSED)
@each_layout
def test_pre_permute_explains_itself(layout, kind, sentence, bad, says):
    with says(kind, f"pre_permute_{layout}: {sentence}"):
        OPS[layout](**{"hidden_states": X, "topk_ids": IDS, "num_local_experts": 4, "recipe": "fp8_block", **bad})


def test_pre_permute_explains_itself_about_workspaces(arena, says):
    space = arena(T=3, top_k=2, E=4, K=256, I=128, recipe="fp8_block", scale_format="fp32", layout="masked")
    needed = space.plan.total_bytes
    fix = "Size it by moe_ops.plan(...).workspace_bytes for the largest T."
    with says(ValueError, f"pre_permute_ws: workspace must be at least {needed} bytes; got {needed - 1}. {fix}"):
        torch.ops.moe.pre_permute_ws(space.ws[: needed - 1], X, IDS, 0, **space.sizes)
    sentence = (
        "pre_permute_masked: result 3 must be of shape the contract's = (3, 2); got (4, 2). The plan is for others."
    )
    with says(ValueError, sentence):
        torch.ops.moe.pre_permute_ws(space.ws, X, IDS, 0, **space.sizes | dict(T=4))


@each_layout
def test_pre_permute_explains_itself_about_gradients(layout, refuses_gradients):
    arguments = dict(hidden_states=X, topk_ids=IDS, num_local_experts=4, recipe="fp8_block")
    refuses_gradients(f"pre_permute_{layout}", OPS[layout], arguments, "hidden_states")
