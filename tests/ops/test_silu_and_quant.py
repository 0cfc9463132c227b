"""moe::silu_and_quant_{contiguous,masked} against float64 formulas, and moe::silu_and_quant_ws against both."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_ops import silu_and_quant_contiguous, silu_and_quant_masked
from moe_ops.backends import BACKENDS
from moe_ops.recipes import RECIPES
from moe_ops.testing import FORMS, PATTERNS, assert_bits_equal
from moe_ops.testing.decode import decode_e4m3, decode_words

SWEEP = settings.get_profile("ops")

# Float32 effects before the one rounding, relative: exp, division and products at 2^-24 each; a rounded argument of exp
# counts |gate| times; a sum that cancels counts by what it multiplies.
FP32 = 4e-7
OPS = {"contiguous": silu_and_quant_contiguous, "masked": silu_and_quant_masked}
FORMULAS = {
    "silu": {},
    "clamped": dict(swiglu_limit=2.0),
    "oai": dict(gemm1_alpha=1.702),
    "oai-clamped": dict(gemm1_alpha=1.702, gemm1_clamp_limit=1.5),
    "situ": dict(activation="situ", gemm1_alpha=3.0, gemm1_clamp_limit=4.0),
}
each_format = pytest.mark.parametrize("recipe, scale_format", FORMS, ids=["-".join(form) for form in FORMS])
each_layout = pytest.mark.parametrize("layout", OPS)
each_formula = pytest.mark.parametrize("formula", FORMULAS.values(), ids=FORMULAS)


def row_map(layout, counts) -> torch.Tensor:
    """m_indices of blocks of 8 rows here (the op does not ask for more), or masked_m; an int32 tensor."""
    if layout == "masked":
        return torch.tensor(counts, dtype=torch.int32)
    rows = [[e] * count + [-1] * (-count % 8) for e, count in enumerate(counts)]
    return torch.tensor(sum(rows, []) + [-1] * 8, dtype=torch.int32)


def owners(layout, rows: torch.Tensor, m_max: int) -> torch.Tensor:
    """The expert of each row, -1 where there is none: (M,) or (E, m_max)."""
    if layout == "contiguous":
        return rows
    slot, expert = torch.arange(m_max), torch.arange(len(rows))[:, None]
    return torch.where(slot < rows[:, None], expert, -1)


def build(layout, counts, I, *, seed=0, m_max=16):
    """(gateup, m_indices or masked_m, owners): rows that nobody owns are NaN."""
    rows = row_map(layout, counts)
    owner = owners(layout, rows, m_max)
    gateup = 3 * torch.randn(*owner.shape, 2 * I, generator=torch.Generator().manual_seed(seed))
    gateup[owner < 0] = float("nan")
    return gateup.bfloat16(), rows, owner


def formula_of(g, u, activation="silu", swiglu_limit=None, gemm1_alpha=None, gemm1_clamp_limit=None):
    """(act, its gate factor) in float64."""
    if activation == "situ":
        gate = gemm1_alpha * torch.tanh(g / gemm1_alpha) / (1 + torch.exp(-g))
        return gate * gemm1_clamp_limit * torch.tanh(u / gemm1_clamp_limit), gate
    limit = gemm1_clamp_limit if gemm1_alpha else swiglu_limit
    if limit:
        g, u = torch.where(g > limit, limit, g), torch.where(u > limit, limit, torch.where(u < -limit, -limit, u))
    gate = g / (1 + torch.exp(-(gemm1_alpha or 1.0) * g))
    return gate * (u + 1 if gemm1_alpha else u), gate


def assert_rows(results, gateup, owner, recipe, nearest, bias=None, **formula):
    """Each owned row is the nearest that its format can say, up to float32 effects; every other row is 0."""
    act_q, act_scale = results
    h = gateup[owner >= 0].double()
    if bias is not None:
        h = h + bias.double()[owner[owner >= 0].long()]
    g, u = h.chunk(2, -1)
    want, gate = formula_of(g, u, **formula)
    slack = FP32 * ((2 + g.abs()) * want.abs() + gate.abs())
    low, high = want - slack, want + slack
    if not RECIPES[recipe].quantised:
        assert act_scale.numel() == 0
        got = act_q[owner >= 0].double()
        low, high = low.bfloat16().double(), high.bfloat16().double()
    else:
        group = RECIPES[recipe].x_group
        G, groups = want.shape[-1] // group, want.shape[-1] // group
        amax, error = (t.abs().unflatten(-1, (G, group)).amax(-1) for t in (want, slack))
        packed = act_scale.dtype == torch.int32
        scale = (decode_words(act_scale, groups) if packed else act_scale.double())[owner >= 0]
        ends = torch.stack((amax - error, amax + error))
        if packed:
            ends = torch.tensor([nearest.exponent(a, 448.0) for a in ends.flatten().tolist()]).view(ends.shape)
            ends = 2.0 ** (ends.double() - 127)
        else:
            ends = ends.clamp(min=1e-10) / 448 * torch.tensor([1 - FP32, 1 + FP32])[:, None, None]
        assert ((ends[0] <= scale) & (scale <= ends[1])).all(), "scale"
        scale = scale.repeat_interleave(group, -1)
        got = decode_e4m3(act_q)[owner >= 0]
        low, high = (decode_e4m3(nearest.e4m3((t / scale).double()).to(torch.uint8)) for t in (low, high))
    wrong = ~((low <= got) & (got <= high))
    assert not wrong.any(), (
        f"{int(wrong.sum())} values, first {got[wrong][0]} outside {low[wrong][0]}, {high[wrong][0]}"
    )
    assert (act_q.view(torch.uint8 if act_q.dtype.itemsize == 1 else torch.int16)[owner < 0] == 0).all()


@pytest.mark.parametrize("counts", [(3, 0, 5), (0, 0)], ids=str)
@each_layout
@each_format
def test_silu_and_quant_meets_its_contract(recipe, scale_format, layout, counts, arena, meets_contract):
    gateup, rows, owner = build(layout, counts, 640)
    M, batch = owner.shape[-1], owner.shape[:-1]
    scale = ((0,), torch.float32, (1,))
    if scale_format != "none":
        G = 640 // RECIPES[recipe].x_group
        width, dtype = (G, torch.float32) if scale_format == "fp32" else (-(-G // 4), torch.int32)
        scale = ((*batch, M, width), dtype, (*(M * width for _ in batch), 1, M))  # M is a multiple of 4 here
    act = ((*batch, M, 640), RECIPES[recipe].x_dtype, (*(M * 640 for _ in batch), 640, 1))
    form = dict(recipe=recipe, scale_format=scale_format)
    op = getattr(torch.ops.moe, f"silu_and_quant_{layout}").default
    meets_contract(op, (act, scale), gateup, rows, **form, swiglu_limit=2.0, bias=torch.randn(len(counts), 1280))
    if not any(counts):
        return  # the workspace form knows no counts before it runs
    space = filled(arena, 0xFF, layout, counts, **form)[0]
    call = (None, "silu", None, 1.702, None)
    meets_contract(torch.ops.moe.silu_and_quant_ws.default, (), *call, **space.sizes, ws=space.ws)


@pytest.mark.parametrize("shape", [(0, 256), (1, 256), (5, 256)], ids=str)
@each_layout
def test_silu_and_quant_meets_its_contract_for_any_number_of_rows(layout, shape, meets_contract):
    gateup = torch.randn(shape).bfloat16()
    rows = torch.zeros(shape[0], dtype=torch.int32)
    column = (shape[0] + 3) // 4 * 4
    wanted = ((shape[0], 128), torch.float8_e4m3fn, (128, 1)), ((shape[0], 1), torch.int32, (1, column))
    if layout == "masked":
        gateup, rows = gateup[None].repeat(2, 1, 1), torch.full((2,), shape[0], dtype=torch.int32)
        wanted = tuple(
            ((2, *size), dtype, (n, *s)) for (size, dtype, s), n in zip(wanted, (shape[0] * 128, column), strict=True)
        )
    op = getattr(torch.ops.moe, f"silu_and_quant_{layout}").default
    meets_contract(op, wanted, gateup, rows, recipe="fp8_block", scale_format="ue8m0")


@pytest.mark.parametrize("bias_dtype", [None, torch.float32, torch.bfloat16], ids=["", "bias", "bias-bf16"])
@each_formula
@each_layout
@each_format
def test_silu_and_quant_matches_reference(recipe, scale_format, layout, formula, bias_dtype, nearest):
    gateup, rows, owner = build(layout, (3, 0, 7, 1), 640)
    bias = None if bias_dtype is None else torch.randn(4, 1280).to(bias_dtype)
    results = OPS[layout](gateup, rows, recipe=recipe, scale_format=scale_format, bias=bias, **formula)
    assert_rows(results, gateup, owner, recipe, nearest, bias, **formula)


@SWEEP
@given(
    counts=st.lists(st.integers(0, 9), min_size=1, max_size=5),
    I=st.sampled_from((128, 384, 512, 1024)),
    form=st.sampled_from(FORMS),
    layout=st.sampled_from(tuple(OPS)),
    formula=st.sampled_from(tuple(FORMULAS.values())),
    biased=st.booleans(),
    seed=st.integers(0, 999),
)
def test_silu_and_quant_matches_reference_sweep(counts, I, form, layout, formula, biased, seed, nearest):
    gateup, rows, owner = build(layout, counts, I, seed=seed)
    bias = torch.randn(len(counts), 2 * I) if biased else None
    results = OPS[layout](gateup, rows, recipe=form[0], scale_format=form[1], bias=bias, **formula)
    assert_rows(results, gateup, owner, form[0], nearest, bias, **formula)


def filled(arena, pattern, layout, counts, *, recipe, scale_format, seed=0):
    """(an arena before this stage, gateup, row map, owners) of a layer of 16 tokens, top_k of 2 and 640 columns."""
    sizes = dict(T=16, top_k=2, E=len(counts), K=256, I=640, recipe=recipe, scale_format=scale_format, layout=layout)
    space = arena(pattern, **sizes)
    name = "m_indices" if layout == "contiguous" else "masked_m"
    owner = owners(layout, torch.tensor(counts, dtype=torch.int32), 128)
    if layout == "contiguous":
        owner = torch.full(space[name].shape, -1, dtype=torch.int32)
        for e, count in enumerate(counts):
            owner[128 * e : 128 * e + count] = e
    rows = owner if layout == "contiguous" else torch.tensor(counts, dtype=torch.int32)
    gateup = 3 * torch.randn(*owner.shape, 1280, generator=torch.Generator().manual_seed(seed)).bfloat16()
    space.put(name, rows)
    space.put("gateup", gateup, owner >= 0)
    return space, gateup, rows, owner


@pytest.mark.parametrize("pattern", PATTERNS, ids=hex)
@each_layout
@each_format
def test_silu_and_quant_touches_nothing_else(recipe, scale_format, layout, pattern, arena, unchanged, integers):
    """Through one arena, and with the functional form's bits: rows that nobody owns keep their bytes."""
    form, bias = dict(recipe=recipe, scale_format=scale_format), torch.randn(3, 1280)
    for seed, counts in enumerate([(3, 0, 7), (0, 16, 1), (0, 0, 0)]):
        space, gateup, rows, owner = filled(arena, pattern, layout, counts, **form, seed=seed)
        with unchanged(gateup, rows, bias):
            results = OPS[layout](gateup, rows, bias=bias, **form)
        written = dict(act_q=owner >= 0, act_scale=owner >= 0) if scale_format != "none" else dict(act_q=owner >= 0)
        with unchanged(bias), space.writes_only(**written):
            torch.ops.moe.silu_and_quant_ws(space.ws, bias, "silu", None, None, None, **space.sizes)
        for index, name in enumerate(written):
            assert_bits_equal(integers(space[name])[owner >= 0], integers(results[index])[owner >= 0], name)


@each_format
def test_silu_and_quant_edges_layouts_and_batches_give_the_same_bits(recipe, scale_format, integers):
    form = dict(recipe=recipe, scale_format=scale_format)
    gateup, masked_m, owner = build("masked", (3, 0, 7), 640)
    slabs = silu_and_quant_masked(gateup, masked_m, **form)
    rows, labels = gateup[owner >= 0], owner[owner >= 0].int()
    lists = silu_and_quant_contiguous(rows, labels, **form)
    assert_bits_equal(integers(slabs[0])[owner >= 0], integers(lists[0]))
    if scale_format != "none":
        assert_bits_equal(slabs[1][owner >= 0], lists[1])
    for m in range(len(rows)):
        alone = silu_and_quant_contiguous(rows[m : m + 1], labels[m : m + 1], **form)[0]
        assert_bits_equal(alone, lists[0][m : m + 1], f"row {m} alone")


@pytest.mark.parametrize("name", ["swiglu_limit", "gemm1_clamp_limit"])
@each_layout
@each_format
def test_silu_and_quant_edges_limits(recipe, scale_format, layout, name, nearest):
    """The gate is bounded above only, the up half on both sides, in every path, and after the bias."""
    pairs = [(20.0, 20.0), (20.0, -20.0), (-20.0, 20.0), (-20.0, -20.0), (9.0, 11.0), (10.0, 10.0)]
    gateup, rows, owner = build(layout, (len(pairs),), 128)
    for m, (g, u) in enumerate(pairs):
        gateup[..., m, :128], gateup[..., m, 128:] = g, u
    formula = {name: 10.0} if name == "swiglu_limit" else {name: 10.0, "gemm1_alpha": 1.0}
    for bias in (None, torch.full((1, 256), 2.0)):
        results = OPS[layout](gateup, rows, recipe=recipe, scale_format=scale_format, bias=bias, **formula)
        assert_rows(results, gateup, owner, recipe, nearest, bias, **formula)
    if (recipe, name) == ("bf16", "swiglu_limit"):
        act = OPS[layout](gateup, rows, recipe=recipe, scale_format=scale_format, **formula)[0][owner >= 0][:, 0]
        assert act[:2].tolist() == [100.0, -100.0] and act[5] == 100.0
        assert act[2] == torch.tensor(10 * -20 / (1 + 485165195.4)).bfloat16()  # silu(-20), not silu(-10)


@each_layout
@each_format
def test_silu_and_quant_edges_zeros_nan_and_infinities(recipe, scale_format, layout):
    gateup, rows, _ = build(layout, (5,), 256)
    row = gateup.view(-1, 512)
    row[0] = 0.0
    row[1, 128:256], row[1, 384:] = 0.0, 0.0
    row[2, 3], row[3, 256 + 5], row[4, 7] = float("nan"), float("inf"), float("inf")
    form = dict(recipe=recipe, scale_format=scale_format)
    act_q, act_scale = OPS[layout](gateup, rows, **form)
    act = act_q.float().view(-1, 256)[:5]
    assert (act[0] == 0).all() and (act[1, 128:] == 0).all()
    assert (~act.isfinite()).nonzero().tolist() == [[2, 3], [3, 5], [4, 7]]
    if RECIPES[recipe].quantised:
        row[2, 3], row[3, 256 + 5], row[4, 7] = 0.0, 0.0, 0.0
        assert_bits_equal(act_scale, OPS[layout](gateup, rows, **form)[1], "a bad value spoiled the scale of its group")


def test_silu_and_quant_edges_large_gates_do_not_overflow():
    """exp of a large argument is infinite in float32: the sigmoid must be 0 or 1 there and not NaN."""
    g = torch.tensor([-1e38, -1e4, -104.0, -89.0, 89.0, 1e4, 1e38])
    gateup = torch.cat((g, torch.ones(7)))[None].bfloat16()
    for formula in FORMULAS.values():
        act = silu_and_quant_contiguous(
            gateup, torch.zeros(1, dtype=torch.int32), recipe="bf16", scale_format="none", **formula
        )[0]
        assert act.isfinite().all(), formula


@pytest.mark.parametrize("I", [128, 384, 512, 640, 1024], ids="I{}".format)
@each_layout
def test_silu_and_quant_edges_packed_width(layout, I, nearest):
    gateup, rows, owner = build(layout, (3, 2), I)
    results = OPS[layout](gateup, rows, recipe="fp8_block", scale_format="ue8m0")
    assert_rows(results, gateup, owner, "fp8_block", nearest)
    missing = -I // 128 % 4
    assert results[1].shape[-1] == -(-I // 512)
    assert missing == 0 or (results[1][..., -1] >> 8 * (4 - missing) & 2 ** (8 * missing) - 1 == 0).all()


ROWS = {"contiguous": torch.zeros(8, dtype=torch.int32), "masked": torch.ones(2, dtype=torch.int32)}
ONE_OF, MOVE = "Choose one of them.", "Move it with .to('cpu')."
SITU = "situ bounds the gate by gemm1_alpha and the up half by gemm1_clamp_limit; pass both, and no swiglu_limit."
OTHER_CLAMP = "The clamp of the gemm1_alpha form is gemm1_clamp_limit."
VALUE_ERRORS = {
    f"activation must be one of silu, situ; got 'gelu'. {ONE_OF}": dict(activation="gelu"),
    "swiglu_limit must be positive; got 0.0. Pass None for no clamp.": dict(swiglu_limit=0.0),
    "gemm1_clamp_limit must be positive; got -1.0. Pass None for no clamp.": dict(gemm1_clamp_limit=-1.0),
    "activation must be situ with both bounds; got gemm1_alpha=1.0, gemm1_clamp_limit=None, swiglu_limit=None. "
    + SITU: dict(activation="situ", gemm1_alpha=1.0),
    "activation must be situ with both bounds; got gemm1_alpha=1.0, gemm1_clamp_limit=1.0, swiglu_limit=1.0. "
    + SITU: dict(activation="situ", gemm1_alpha=1.0, gemm1_clamp_limit=1.0, swiglu_limit=1.0),
    "gemm1_alpha must be other than 0 for situ; got 0.0. It is a divisor.": dict(
        activation="situ", gemm1_alpha=0.0, gemm1_clamp_limit=1.0
    ),
    f"swiglu_limit must be None beside gemm1_alpha; got 7.0. {OTHER_CLAMP}": dict(swiglu_limit=7.0, gemm1_alpha=1.0),
    "gemm1_clamp_limit must be None without gemm1_alpha; got 7.0. The clamp of plain silu is swiglu_limit.": dict(
        gemm1_clamp_limit=7.0
    ),
    "2 I, the last axis of gateup, must be a multiple of 2; got 255. Gate and up lie side by side.": dict(columns=255),
    "I must be a multiple of 128; got 192. Pad w13 and w2 with zeros: moe_ops.prepare_weights.": dict(columns=384),
    "I must be a multiple of 32; got 80. Pad w13 and w2 with zeros: moe_ops.prepare_weights.": dict(
        columns=160, recipe="mxfp8", scale_format="ue8m0"
    ),
    f"recipe must be one of bf16, fp8_block, mxfp8, mxfp4; got 'int8'. {ONE_OF}": dict(recipe="int8"),
    "scale_format must be one of fp32, ue8m0; got 'none'. These are the formats of recipe fp8_block.": dict(
        scale_format="none"
    ),
    f"bias must be on cpu; got meta. {MOVE}": dict(bias=torch.ones(2, 256, device="meta")),
    f"backend must be one of {', '.join(BACKENDS)}; got 'cuda'. {ONE_OF}": dict(backend="cuda"),
}
TYPE_ERRORS = {
    "gateup must be bfloat16; got float32. It is what the grouped GEMM writes.": dict(dtype=torch.float32),
    "bias must be bfloat16 or float16 or float32; got int32. Cast it first.": dict(
        bias=torch.ones(2, 256, dtype=torch.int32)
    ),
}
REFUSED = [
    pytest.param(kind, sentence, bad, id=sentence.split(";")[0])
    for kind, table in ((ValueError, VALUE_ERRORS), (TypeError, TYPE_ERRORS))
    for sentence, bad in table.items()
]


def gateup_of(layout, columns=256, dtype=torch.bfloat16) -> torch.Tensor:
    return torch.ones(8, columns, dtype=dtype) if layout == "contiguous" else torch.ones(2, 4, columns, dtype=dtype)


@pytest.mark.parametrize("kind, sentence, bad", REFUSED)
@each_layout
def test_silu_and_quant_explains_itself(layout, kind, sentence, bad, says):
    bad = dict(bad)
    gateup = gateup_of(layout, bad.pop("columns", 256), bad.pop("dtype", torch.bfloat16))
    with says(kind, f"silu_and_quant_{layout}: {sentence}"):
        OPS[layout](gateup, ROWS[layout], **{"recipe": "fp8_block", **bad})


ABOUT_ROWS = {
    "contiguous": {
        "gateup must be of shape (M, 2 I); got (256,). Pass GEMM1's result.": dict(gateup=gateup_of("masked")[0, 0]),
        "m_indices must be of shape (M,) = (8,); got (7,). One expert per row, -1 for padding.": dict(rows=slice(7)),
        f"m_indices must be on cpu; got meta. {MOVE}": dict(device="meta"),
        "m_indices must be int32; got int64. Use m_indices.int().": dict(dtype=torch.int64),
        "bias must be of shape (E, 2 I) = (any, 256); got (3, 9). One row per local expert.": dict(
            bias=torch.ones(3, 9)
        ),
    },
    "masked": {
        "gateup must be of shape (E, m_max, 2 I); got (8, 256). Pass GEMM1's result.": dict(
            gateup=gateup_of("contiguous")
        ),
        "masked_m must be of shape (E,) = (2,); got (1,). Valid rows of each expert's slab.": dict(rows=slice(1)),
        f"masked_m must be on cpu; got meta. {MOVE}": dict(device="meta"),
        "masked_m must be int32; got int64. Use masked_m.int().": dict(dtype=torch.int64),
        "bias must be of shape (E, 2 I) = (2, 256); got (3, 256). One row per local expert.": dict(
            bias=torch.ones(3, 256)
        ),
    },
}


@pytest.mark.parametrize(
    "layout, sentence, bad", [(layout, *item) for layout, table in ABOUT_ROWS.items() for item in table.items()]
)
def test_silu_and_quant_explains_itself_about_rows(layout, sentence, bad, says):
    rows = ROWS[layout][bad.get("rows", slice(None))].to(bad.get("device", "cpu"), bad.get("dtype", torch.int32))
    with says(TypeError if "dtype" in bad else ValueError, f"silu_and_quant_{layout}: {sentence}"):
        OPS[layout](bad.get("gateup", gateup_of(layout)), rows, recipe="fp8_block", bias=bad.get("bias"))


@pytest.mark.parametrize("name", ["gateup", "bias"])
@each_layout
def test_silu_and_quant_explains_itself_about_gradients(layout, name, refuses_gradients):
    rows = "m_indices" if layout == "contiguous" else "masked_m"
    arguments = dict(gateup=gateup_of(layout), bias=torch.ones(2, 256), recipe="fp8_block") | {rows: ROWS[layout]}
    refuses_gradients(f"silu_and_quant_{layout}", OPS[layout], arguments, name)


@pytest.mark.parametrize("count", [-1, 129])
def test_silu_and_quant_explains_itself_about_counts_outside_the_slab(count):
    gateup, masked_m = torch.zeros(2, 128, 256, dtype=torch.bfloat16), torch.tensor([0, count], dtype=torch.int32)
    with pytest.raises(ValueError) as caught:
        torch.ops.moe.silu_and_quant_masked(gateup, masked_m, recipe="bf16", scale_format="none")
    assert str(caught.value) == (
        f"silu_and_quant_masked: masked_m must be between 0 and m_max=128; got {count} for expert 1. "
        "Pass pre_permute's result."
    )


def test_silu_and_quant_explains_itself_about_labels_without_a_bias_row():
    gateup, labels = torch.zeros(128, 256, dtype=torch.bfloat16), torch.full((128,), 3, dtype=torch.int32)
    with pytest.raises(ValueError) as caught:
        torch.ops.moe.silu_and_quant_contiguous(
            gateup, labels, recipe="bf16", scale_format="none", bias=torch.zeros(3, 256)
        )
    assert str(caught.value) == (
        "silu_and_quant_contiguous: m_indices must be below 3, the experts of bias; got 3 at (0,). "
        "Pass pre_permute's result."
    )
