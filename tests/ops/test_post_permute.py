"""moe::post_permute against a float32 loop over tokens and routes, bit for bit, and moe::post_permute_ws."""

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_ops import post_permute, pre_permute_contiguous, pre_permute_masked
from moe_ops.backends import BACKENDS
from moe_ops.ops.post_permute import POST_PERMUTE
from moe_ops.testing import PATTERNS, assert_bits_equal, poisoned, random_routing, relative_error
from moe_ops.testing.cases import DISTRIBUTIONS

SWEEP = settings.get_profile("ops")

FLOAT32_SUM = 1e-6  # relative: a few roundings of 2^-24 against the same sum in float64
REALS = (numpy.float32, numpy.float64)
PRE = {"contiguous": pre_permute_contiguous, "masked": pre_permute_masked}
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
each_layout = pytest.mark.parametrize("layout", PRE)
each_mode = pytest.mark.parametrize("mode", ["sum", "routewise"])
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])


def build(layout, T=9, E=4, top_k=3, K=24, distribution="uniform", *, seed=0, dtype=torch.bfloat16, expert_start=0):
    """(rows, src2dst, topk_weights, topk_ids); rows that no route names are NaN, and so are the weights of -1."""
    generator = torch.Generator().manual_seed(seed)
    weights, ids = random_routing(T, E, top_k, distribution, generator)
    ids = torch.where(ids >= 0, ids + expert_start, ids)
    x = torch.zeros(T, 8)
    place = dict(num_local_experts=E, recipe="bf16", scale_format="none", expert_start=expert_start)
    x_q, _, _, src2dst = PRE[layout](x, ids, **place)
    rows = torch.randn(*x_q.shape[:-1], K, generator=generator)
    used = torch.zeros(rows.shape[:-1].numel(), dtype=torch.bool)
    used[src2dst[src2dst >= 0].long()] = True
    rows.view(-1, K)[~used] = float("nan")
    return rows.to(dtype), src2dst, torch.where(src2dst >= 0, weights, float("nan")), ids


def judge(rows, src2dst, weights, ids=None, bias=None, *, expert_start=0, factor=1.0, mode="sum", real=numpy.float32):
    """(T, K) or (T, top_k, K): every product and sum rounded to `real`, in the order of routes."""
    flat = rows.flatten(0, -2).double().numpy().astype(real)
    T, top_k = src2dst.shape
    out = numpy.zeros((T, top_k, rows.shape[-1]), real)
    total = numpy.zeros((T, rows.shape[-1]), real)
    for t in range(T):
        for j in range(top_k):
            if src2dst[t, j] < 0:
                continue
            value = flat[src2dst[t, j]]
            if bias is not None:
                value = value + bias[ids[t, j] - expert_start].double().numpy().astype(real)
            if weights is not None:
                value = value * real(weights[t, j].item())
            total[t] = total[t] + value
            out[t, j] = value * real(factor)
    return torch.from_numpy(total * real(factor) if mode == "sum" else out)


@pytest.mark.parametrize(
    "T, out_dtype", [(0, None), (1, torch.float16), (5, torch.float32), (6, torch.bfloat16)], ids=str
)
@each_mode
@each_layout
def test_post_permute_meets_its_contract(layout, mode, out_dtype, T, meets_contract):
    rows, src2dst, weights, ids = build(layout, T)
    shape, stride = ((T, 24), (24, 1)) if mode == "sum" else ((T, 3, 24), (72, 24, 1))
    more = dict(topk_ids=ids, bias=torch.randn(4, 24), routed_scaling_factor=2.5, mode=mode, dtype=out_dtype)
    wanted = ((shape, out_dtype or torch.bfloat16, stride),)
    meets_contract(torch.ops.moe.post_permute.default, wanted, rows, src2dst, weights, **more)


@pytest.mark.parametrize("T", [0, 5])
@each_layout
def test_post_permute_meets_its_contract_on_a_workspace(layout, T, arena, meets_contract):
    space, weights, ids = filled(arena, 0xFF, layout, T)[:3]
    call = (weights, ids, torch.randn(4, 256), 0, 2.5, "float32")
    wanted = (((T, 256), torch.float32, (256, 1)),)  # the workspace is only read: an argument like the others
    meets_contract(torch.ops.moe.post_permute_ws.default, wanted, space.ws, *call, **space.sizes)


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@each_mode
@each_dtype
@each_layout
def test_post_permute_matches_reference(layout, dtype, mode, distribution):
    """Float32, in the order of routes, one rounding at the end: bit for bit; and close to the same in float64."""
    rows, src2dst, all_weights, ids = build(layout, distribution=distribution, dtype=dtype, expert_start=2)
    for weights, bias, factor in (
        (all_weights, None, 1.0),
        (all_weights, torch.randn(4, 24), 2.5),
        (None, torch.randn(4, 24).bfloat16(), 1.0),
        (None, None, 0.1),
    ):
        more = dict(topk_ids=ids, bias=bias, expert_start=2, routed_scaling_factor=factor, mode=mode)
        got = post_permute(rows, src2dst, weights, dtype=torch.float32, **more)
        case = (rows, src2dst, weights, ids, bias)
        want, exact = (judge(*case, expert_start=2, factor=factor, mode=mode, real=r) for r in REALS)
        assert_bits_equal(got + 0.0, want + 0.0)  # + 0.0: a zero has no sign to agree on
        assert relative_error(got, exact) <= FLOAT32_SUM
        assert_bits_equal(post_permute(rows, src2dst, weights, **more), got.to(dtype), "one rounding")


@SWEEP
@given(
    T=st.integers(0, 9),
    E=st.integers(1, 5),
    top_k=st.integers(1, 5),
    K=st.integers(1, 40),
    layout=st.sampled_from(tuple(PRE)),
    distribution=st.sampled_from(DISTRIBUTIONS[1:]),
    mode=st.sampled_from(("sum", "routewise")),
    expert_start=st.integers(0, 3),
    weight_dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 999),
)
def test_post_permute_matches_reference_sweep(
    T, E, top_k, K, layout, distribution, mode, expert_start, weight_dtype, seed
):
    rows, src2dst, weights, ids = build(layout, T, E, top_k, K, distribution, seed=seed, expert_start=expert_start)
    weights, bias = weights.to(weight_dtype), torch.randn(E, K)
    got = post_permute(
        rows,
        src2dst,
        weights,
        topk_ids=ids.long(),
        bias=bias,
        expert_start=expert_start,
        mode=mode,
        dtype=torch.float32,
    )
    want = judge(rows, src2dst, weights, ids, bias, expert_start=expert_start, mode=mode)
    assert_bits_equal(got + 0.0, want + 0.0)


def filled(arena, pattern, layout, T, distribution="uniform"):
    """(an arena before the last stage, topk_weights, topk_ids, rows, src2dst)."""
    rows, src2dst, weights, ids = build(layout, T, K=256, distribution=distribution)
    form = dict(recipe="bf16", scale_format="none", layout=layout)
    space = arena(pattern, T=T, top_k=3, E=4, K=256, I=128, **form)
    space.put("src2dst", src2dst)
    used = ~rows[..., 0].isnan()
    space.put("down", rows, used)
    return space, weights, ids, rows, src2dst


@pytest.mark.parametrize("pattern", PATTERNS, ids=hex)
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@each_layout
def test_post_permute_touches_nothing_else(layout, distribution, pattern, arena, unchanged):
    """The workspace is only read; the result is fresh, with the functional form's bits; inputs stay as they are."""
    space, weights, ids, rows, src2dst = filled(arena, pattern, layout, 13, distribution)
    bias, more = torch.randn(4, 256), dict(routed_scaling_factor=2.5, dtype=torch.float16)
    with unchanged(rows, src2dst, weights, ids, bias, space.ws):
        want = post_permute(rows, src2dst, weights, topk_ids=ids, bias=bias, **more)
        got = torch.ops.moe.post_permute_ws(space.ws, weights, ids, bias, 0, 2.5, "float16", **space.sizes)
    assert_bits_equal(got, want)
    assert got.untyped_storage().data_ptr() != space.ws.untyped_storage().data_ptr()


@pytest.mark.parametrize("pattern", PATTERNS, ids=hex)
@each_mode
def test_post_permute_touches_nothing_else_and_writes_every_element(mode, pattern):
    rows, src2dst, weights, _ = build("masked", distribution="foreign", dtype=torch.float32)
    want = post_permute(rows, src2dst, weights, mode=mode)
    out = poisoned(want.nbytes, pattern).view(want.dtype).view(want.shape)
    rest = dict(topk_ids=None, bias=None, expert_start=0, routed_scaling_factor=1.0, dtype=None, backend="auto")
    POST_PERMUTE.into((out,), rows=rows, src2dst=src2dst, topk_weights=weights, mode=mode, **rest)
    assert_bits_equal(out, want)


@each_mode
def test_post_permute_edges_no_local_route_gives_zeros(mode):
    """Whatever the rows and the weights hold: 0 * NaN must not happen."""
    rows = torch.full((128, 8), float("nan"))
    src2dst = torch.full((5, 3), -1, dtype=torch.int32)
    out = post_permute(rows, src2dst, torch.full((5, 3), float("nan")), mode=mode)
    assert_bits_equal(out, torch.zeros(out.shape))
    assert_bits_equal(post_permute(rows[:0], src2dst, mode=mode), torch.zeros(out.shape))  # no row at all


@each_mode
def test_post_permute_edges_minus_one_does_not_read_the_last_row(mode):
    rows = torch.arange(4.0)[:, None].repeat(1, 2)
    out = post_permute(rows, torch.tensor([[-1, 1], [3, -1]], dtype=torch.int32), mode=mode)
    assert (out if mode == "sum" else out.sum(1)).tolist() == [[1, 1], [3, 3]]


def test_post_permute_edges_one_row_may_serve_several_routes():
    rows = torch.tensor([[1.0], [10.0]])
    out = post_permute(rows, torch.tensor([[0, 0], [1, 0]], dtype=torch.int32), torch.tensor([[0.25, 0.5], [1, 2]]))
    assert out.tolist() == [[0.75], [12.0]]


@pytest.mark.parametrize("factor", [2.5, 0.5, 4.0])
@each_mode
@each_layout
def test_post_permute_edges_the_scaling_factor_counts_once(layout, mode, factor):
    rows, src2dst, weights, ids = build(layout)
    form = dict(topk_ids=ids, bias=torch.randn(4, 24), mode=mode, dtype=torch.float32)
    plain = post_permute(rows, src2dst, weights, **form)
    assert_bits_equal(post_permute(rows, src2dst, weights, routed_scaling_factor=factor, **form), plain * factor)


def test_post_permute_edges_sums_in_float32():
    """1 + 2^-9 is lost in bf16 and kept until the end in float32; 65504 * 2 overflows fp16 and comes back."""
    src2dst = torch.tensor([[0, 1, 2]], dtype=torch.int32)
    rows = torch.tensor([[1.0], [2.0**-9], [2.0**-8]])
    assert post_permute(rows.bfloat16(), src2dst, dtype=torch.float32).item() == 1 + 2.0**-9 + 2.0**-8
    rows = torch.tensor([[65504.0], [65504.0], [-65504.0]]).half()
    assert post_permute(rows, src2dst).item() == 65504.0


def test_post_permute_edges_routewise_adds_up_to_the_sum():
    rows, src2dst, weights, _ = build("masked", dtype=torch.float32)
    routes = post_permute(rows, src2dst, weights, mode="routewise")
    total = routes[:, 0]
    for j in range(1, 3):
        total = total + routes[:, j]
    assert_bits_equal(total, post_permute(rows, src2dst, weights))


def test_post_permute_edges_strided_inputs():
    rows, src2dst, weights, ids = build("contiguous", distribution="foreign")
    want = post_permute(rows, src2dst, weights)
    turned = [tensor.T.contiguous().T for tensor in (rows, src2dst, weights)]
    assert_bits_equal(post_permute(*turned), want)


def test_post_permute_edges_more_tokens_than_a_grid_axis():
    src2dst = (torch.arange(65537, dtype=torch.int32) % 7)[:, None]
    out = post_permute(torch.arange(7.0)[:, None], src2dst)
    assert_bits_equal(out, src2dst.float())


ROWS, MAP = torch.ones(8, 4), torch.zeros(3, 2, dtype=torch.int32)
IDS, BIAS = torch.zeros(3, 2, dtype=torch.int32), torch.ones(2, 4)
ONE_OF, MOVE = "Choose one of them.", "Move it with .to('cpu')."
RIGHT_IDS = "Pass the topk_ids and expert_start that pre_permute was given."
IN_RANGE = "topk_ids of routes with a row must be in [{}, {}), the experts of bias; got {}. " + RIGHT_IDS
VALUE_ERRORS = {
    "rows must be of shape (M, K) or (E, m_max, K); got (4,). Pass GEMM2's result.": dict(rows=ROWS[0]),
    "src2dst must be of shape (T, top_k); got (3,). Unflatten it.": dict(src2dst=MAP[:, 0]),
    "topk_weights must be of shape (T, top_k) = (3, 2); got (3, 1). One weight per route.": dict(
        topk_weights=torch.ones(3, 1)
    ),
    "bias must be of shape (E, K) = (any, 4); got (2, 3). One row per local expert.": dict(bias=BIAS[:, :3]),
    "topk_ids must be given beside bias; got None. Pass it.": dict(bias=BIAS),
    "topk_ids must be of shape (T, top_k) = (3, 2); got (3, 1). The ids that pre_permute was given.": dict(
        bias=BIAS, topk_ids=IDS[:, :1]
    ),
    IN_RANGE.format(0, 2, 2): dict(bias=BIAS, topk_ids=IDS + 2),
    IN_RANGE.format(0, 2, -1): dict(bias=BIAS, topk_ids=IDS - 1),
    IN_RANGE.format(4, 6, 3): dict(bias=BIAS, topk_ids=IDS + 3, expert_start=4),
    f"mode must be one of sum, routewise; got 'mean'. {ONE_OF}": dict(mode="mean"),
    "dtype must be bfloat16, float16 or float32; got torch.float64. Choose one of them.": dict(dtype=torch.float64),
    f"src2dst must be on cpu; got meta. {MOVE}": dict(src2dst=MAP.to("meta")),
    f"topk_weights must be on cpu; got meta. {MOVE}": dict(topk_weights=torch.ones(3, 2, device="meta")),
    f"topk_ids must be on cpu; got meta. {MOVE}": dict(bias=BIAS, topk_ids=IDS.to("meta")),
    f"bias must be on cpu; got meta. {MOVE}": dict(bias=BIAS.to("meta"), topk_ids=IDS),
    f"backend must be one of {', '.join(BACKENDS)}; got 'cuda'. {ONE_OF}": dict(backend="cuda"),
}
TYPE_ERRORS = {
    "rows must be bfloat16 or float16 or float32; got float64. It is what the grouped GEMM writes.": dict(
        rows=ROWS.double()
    ),
    "src2dst must be int32; got int64. Pass pre_permute's result.": dict(src2dst=MAP.long()),
    "topk_weights must be bfloat16 or float16 or float32; got int32. Use topk_weights.float().": dict(topk_weights=IDS),
    "topk_ids must be int32 or int64; got float32. Use topk_ids.int().": dict(bias=BIAS, topk_ids=IDS.float()),
    "bias must be bfloat16 or float16 or float32; got int64. Cast it first.": dict(bias=BIAS.long(), topk_ids=IDS),
}
REFUSED = [
    pytest.param(kind, sentence, bad, id=sentence.split(". ")[0])
    for kind, table in ((ValueError, VALUE_ERRORS), (TypeError, TYPE_ERRORS))
    for sentence, bad in table.items()
]


@pytest.mark.parametrize("kind, sentence, bad", REFUSED)
def test_post_permute_explains_itself(kind, sentence, bad, says):
    with says(kind, f"post_permute: {sentence}"):
        post_permute(**{"rows": ROWS, "src2dst": MAP, **bad})


@pytest.mark.parametrize("name", ["rows", "topk_weights", "bias"])
def test_post_permute_explains_itself_about_gradients(name, refuses_gradients):
    arguments = dict(rows=ROWS, src2dst=MAP, topk_weights=torch.ones(3, 2), bias=BIAS, topk_ids=IDS)
    refuses_gradients("post_permute", post_permute, arguments, name)


def test_post_permute_explains_itself_about_rows_that_are_not_there():
    rows, src2dst = torch.zeros(128, 256, dtype=torch.bfloat16), torch.tensor([[0, 128]], dtype=torch.int32)
    with pytest.raises(ValueError) as caught:
        torch.ops.moe.post_permute(rows, src2dst)
    assert str(caught.value) == (
        "post_permute: src2dst must be below 128, the rows; got 128 at (0, 1). Pass pre_permute's result."
    )
