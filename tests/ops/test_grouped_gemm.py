"""moe::grouped_gemm_{contiguous,masked} against float64 products of decoded codes, and moe::grouped_gemm_ws."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_ops import grouped_gemm_contiguous, grouped_gemm_masked
from moe_ops.backends import BACKENDS
from moe_ops.recipes import RECIPES
from moe_ops.rows import LAYOUTS
from moe_ops.spec import TensorSpec
from moe_ops.testing import FORMS, PATTERNS, assert_bits_equal, decode_rows, decode_weight

SWEEP = settings.get_profile("ops")

# Error of the float32 sum before its one rounding, relative to the sum of magnitudes: 16 half-steps of 2^-24, and sums
# here have at most 1024 terms in blocks. Around it the result must be the nearest bf16.
ACCUMULATED = 2.0**-20
OPS = {"contiguous": grouped_gemm_contiguous, "masked": grouped_gemm_masked}
ROW_MAP = {"contiguous": "m_indices", "masked": "masked_m"}
each_format = pytest.mark.parametrize("recipe, scale_format", FORMS, ids=["-".join(form) for form in FORMS])
each_layout = pytest.mark.parametrize("layout", OPS)


def codes(shape, generator) -> torch.Tensor:
    """Any e4m3 value but NaN, subnormals and both zeros included; small magnitudes, so that sums do not drown."""
    byte = torch.randint(0, 0x50, shape, generator=generator) + 128 * torch.randint(0, 2, shape, generator=generator)
    return byte.to(torch.uint8).view(torch.float8_e4m3fn)


def words(shape, groups, generator) -> torch.Tensor:
    """MN-major packed exponents; bytes past the last group and the padding of M hold garbage that nobody may read."""
    byte = torch.randint(118, 132, (*shape, 4 * -(-groups // 4)), generator=generator)
    byte[..., groups:] = 255
    out = TensorSpec.mn_major(*shape, byte.shape[-1] // 4, dtype=torch.int32).empty("cpu")
    return out.copy_(byte.to(torch.uint8).view(torch.int32))


def floats(spec: TensorSpec, generator) -> torch.Tensor:
    return spec.empty("cpu").copy_(torch.rand(spec.shape, generator=generator) + 0.01)


def activations(recipe, scale_format, *shape, generator):
    """(x, x_scale) of shape (..., M, K)."""
    row = RECIPES[recipe]
    if not row.quantised:
        return torch.randn(shape, generator=generator).bfloat16(), None
    groups = shape[-1] // row.x_group
    if scale_format == "ue8m0":
        return codes(shape, generator), words(shape[:-1], groups, generator)
    return codes(shape, generator), floats(TensorSpec.mn_major(*shape[:-1], groups, dtype=torch.float32), generator)


def weights(recipe, scale_format, E, N, K, *, generator):
    """(w, w_scale) as prepared: one row of scales per row for ue8m0, one per 128 rows for fp32."""
    row = RECIPES[recipe]
    if not row.quantised:
        return torch.randn(E, N, K, generator=generator).bfloat16(), None
    w = codes((E, N, K), generator)
    if row.w_pack == 2:
        w = torch.randint(-128, 128, (E, N, K // 2), generator=generator).to(torch.int8)
    groups = -(-K // row.w_block[1])
    if scale_format == "ue8m0":
        return w, words((E, N), groups, generator)
    return w, floats(TensorSpec.contiguous(E, -(-N // 128), groups, dtype=torch.float32), generator)


def build(recipe, scale_format, layout, counts=(3, 0, 130), N=160, K=640, *, M=None, seed=0):
    """(operands, row map, owners): rows that nobody owns, and their scales, are full of NaN.

    M rows: one list of blocks with blocks of padding behind it, or slabs of M rows.
    """
    generator, E = torch.Generator().manual_seed(seed), len(counts)
    if layout == "contiguous":
        labels = sum(([e] * count + [-1] * (-count % 128) for e, count in enumerate(counts)), [])
        labels += [-1] * (128 if M is None else M - len(labels))
        rows = owner = torch.tensor(labels, dtype=torch.int32)
    else:
        rows = torch.tensor(counts, dtype=torch.int32)
        slot = torch.arange(256 if M is None else M)
        owner = torch.where(slot < rows[:, None], torch.arange(E)[:, None], -1)
    x, x_scale = activations(recipe, scale_format, *owner.shape, K, generator=generator)
    for tensor in (x, x_scale):
        if tensor is not None:
            bits = {1: torch.int8, 2: torch.int16, 4: torch.int32}[tensor.dtype.itemsize]
            tensor.view(bits)[owner < 0] = -1
    return (x, x_scale, *weights(recipe, scale_format, E, N, K, generator=generator)), rows, owner


def assert_rows(out, operands, owner, recipe):
    """Owned rows are the bf16 nearest to the exact product, up to the float32 sum; the reference leaves the rest 0."""
    x, x_scale, w, w_scale = operands
    rows, weight = decode_rows(x, x_scale, RECIPES[recipe]), decode_weight(w, w_scale, RECIPES[recipe])
    for e in range(len(w)):
        got = out[owner == e].double()
        exact = rows[owner == e] @ weight[e].T
        slack = ACCUMULATED * (rows[owner == e].abs() @ weight[e].T.abs())
        low, high = ((exact + sign * slack).bfloat16().double() for sign in (-1, 1))
        wrong = ~((low <= got) & (got <= high))
        assert not wrong.any(), f"expert {e}: {int(wrong.sum())} values, first {got[wrong][0]} for {exact[wrong][0]}"
    assert (out[owner < 0] == 0).all()


@each_layout
@each_format
def test_grouped_gemm_meets_its_contract(recipe, scale_format, layout, meets_contract):
    operands, rows, owner = build(recipe, scale_format, layout, (3, 0, 5))
    shape = (*owner.shape, 160)
    stride = (160, 1) if layout == "contiguous" else (owner.shape[1] * 160, 160, 1)
    op = getattr(torch.ops.moe, f"grouped_gemm_{layout}").default
    meets_contract(op, ((shape, torch.bfloat16, stride),), *operands, rows, recipe=recipe)


@pytest.mark.parametrize("M", [0, 1, 5])
@each_format
def test_grouped_gemm_meets_its_contract_for_any_slab(recipe, scale_format, M, meets_contract):
    operands, rows, owner = build(recipe, scale_format, "masked", (min(M, 1), M), 128, 256, M=M)
    wanted = (((2, M, 128), torch.bfloat16, (M * 128, 128, 1)),)
    op = torch.ops.moe.grouped_gemm_masked.default
    (out,) = meets_contract(op, wanted, *operands, rows, recipe=recipe, expected_m=0)
    assert_rows(out, operands, owner, recipe)


@each_format
def test_grouped_gemm_meets_its_contract_without_rows(recipe, scale_format, meets_contract):
    operands, rows, _ = build(recipe, scale_format, "contiguous", (0, 0), 128, 256, M=0)
    wanted = (((0, 128), torch.bfloat16, (128, 1)),)
    meets_contract(torch.ops.moe.grouped_gemm_contiguous.default, wanted, *operands, rows, recipe=recipe)


@pytest.mark.parametrize("counts", [(3, 0, 130), (0, 5), (0, 0), (1,)], ids=str)
@each_layout
@each_format
def test_grouped_gemm_matches_reference(recipe, scale_format, layout, counts):
    operands, rows, owner = build(recipe, scale_format, layout, counts)
    assert_rows(OPS[layout](*operands, rows, recipe=recipe), operands, owner, recipe)


@SWEEP
@given(
    counts=st.lists(st.sampled_from((0, 1, 2, 17, 128, 129)), min_size=1, max_size=4),
    N=st.sampled_from((1, 32, 128, 200, 256)),
    K=st.sampled_from((128, 256, 384, 512, 640, 1024)),
    form=st.sampled_from(FORMS),
    layout=st.sampled_from(tuple(OPS)),
    seed=st.integers(0, 999),
)
def test_grouped_gemm_matches_reference_sweep(counts, N, K, form, layout, seed):
    operands, rows, owner = build(*form, layout, counts, N, K, seed=seed)
    assert_rows(OPS[layout](*operands, rows, recipe=form[0]), operands, owner, form[0])


def filled(arena, pattern, layout, stage, operands, rows, owner, recipe, scale_format):
    """An arena before a GEMM of 2 I = N or of I = K columns, holding the rows that somebody owns."""
    x, x_scale, w, _ = operands
    E, N, K = w.shape[0], w.shape[1], x.shape[-1]
    sizes = dict(K=K, I=N // 2) if stage == "gemm1" else dict(K=N, I=K)
    space = arena(pattern, T=16, top_k=2, E=E, **sizes, recipe=recipe, scale_format=scale_format, layout=layout)
    name, name_of_scale = ("x_q", "x_scale") if stage == "gemm1" else ("act_q", "act_scale")
    space.put(ROW_MAP[layout], rows)
    space.put(name, x, owner >= 0)
    if x_scale is not None:
        space.put(name_of_scale, x_scale, owner >= 0)
    return space


def stage_call(stage, w, w_scale):
    """(op, arguments behind ws and before the sizes) of a GEMM in a layout whose activation is a stage of its own."""
    ids, weight = torch.zeros(16, 2, dtype=torch.int32), (w, w_scale, None, None)
    if stage == "gemm1":
        x = torch.zeros(16, w.shape[-1])
        return torch.ops.moe.gated_gemm_ws.default, (x, ids, *weight, None, "silu", None, None, None, 0)
    return torch.ops.moe.grouped_gemm_ws.default, (ids, *weight, 0)


@pytest.mark.parametrize("pattern", PATTERNS, ids=hex)
@pytest.mark.parametrize("stage", ["gemm1", "gemm2"])
@each_layout
@each_format
def test_grouped_gemm_touches_nothing_else(
    recipe, scale_format, layout, stage, pattern, arena, unchanged, meets_contract
):
    """On an arena, with the functional form's bits; rows that nobody owns are neither read nor written."""
    form, out = dict(recipe=recipe, scale_format=scale_format), "gateup" if stage == "gemm1" else "down"
    for seed, counts in enumerate([(0, 0, 0), (0, 16, 1), (3, 0, 7)]):
        M = 3 * 128 if layout == "contiguous" else 128  # what 16 tokens with two experts each need
        operands, rows, owner = build(**form, layout=layout, counts=counts, N=256, M=M, seed=seed)
        space = filled(arena, pattern, layout, stage, operands, rows, owner, **form)
        with unchanged(*operands, rows):
            want = OPS[layout](*operands, rows, recipe=recipe)
        op, call = stage_call(stage, *operands[2:])
        before = space.ws.clone()
        with unchanged(*operands[2:]), space.writes_only(**{out: owner >= 0}):
            op(space.ws, *call, **space.sizes)
        assert_bits_equal(space[out][owner >= 0], want[owner >= 0])
    if pattern == PATTERNS[0]:
        meets_contract(op, (), *call, **space.sizes, ws=before)


@each_format
def test_grouped_gemm_edges_layouts_give_the_same_bits(recipe, scale_format):
    (x, x_scale, w, w_scale), masked_m, owner = build(recipe, scale_format, "masked", (3, 0, 128), M=128)
    slabs = grouped_gemm_masked(x, x_scale, w, w_scale, masked_m, recipe=recipe)
    labels = owner.flatten().int()  # slabs are whole blocks here, one after another
    if x_scale is not None:
        flat = TensorSpec.mn_major(len(labels), x_scale.shape[-1], dtype=x_scale.dtype).empty("cpu")
        x_scale = flat.copy_(x_scale.flatten(0, 1))
    lists = grouped_gemm_contiguous(x.flatten(0, 1), x_scale, w, w_scale, labels, recipe=recipe)
    assert_bits_equal(lists[labels >= 0], slabs[owner >= 0])


@each_format
def test_grouped_gemm_edges_the_hint_changes_nothing(recipe, scale_format):
    operands, rows, _ = build(recipe, scale_format, "masked")
    want = grouped_gemm_masked(*operands, rows, recipe=recipe)
    for expected_m in (0, 1, 2**31):
        assert_bits_equal(grouped_gemm_masked(*operands, rows, recipe=recipe, expected_m=expected_m), want)


def test_grouped_gemm_edges_the_low_nibble_is_the_even_column():
    x = torch.zeros(1, 1, 128).to(torch.float8_e4m3fn)
    x.view(torch.uint8)[..., 2] = 0x38  # 1.0 in column 2
    x_scale = TensorSpec.mn_major(1, 1, 1, dtype=torch.int32).empty("cpu").fill_(127)
    w = torch.zeros(1, 1, 64, dtype=torch.int8)
    w[..., 1] = 0x72  # columns 2 and 3: 1.0 and 6.0
    w_scale = TensorSpec.mn_major(1, 1, 1, dtype=torch.int32).empty("cpu").fill_(0x7F7F7F80)  # 2, 1, 1, 1
    one = torch.ones(1, dtype=torch.int32)
    assert grouped_gemm_masked(x, x_scale, w, w_scale, one, recipe="mxfp4").item() == 2.0


@each_layout
def test_grouped_gemm_edges_rounds_once(layout):
    """256 + 1 + 1 + ...: a bf16 accumulator would stay at 256."""
    x = torch.ones(1, 128, 128).bfloat16()
    x[..., 0] = 256.0
    w, rows = torch.ones(1, 1, 128).bfloat16(), torch.tensor([128], dtype=torch.int32)
    if layout == "contiguous":
        x, rows = x[0], torch.zeros(128, dtype=torch.int32)
    assert (OPS[layout](x, None, w, None, rows, recipe="bf16") == torch.tensor(383.0).bfloat16()).all()


X, W = torch.zeros(128, 256).bfloat16(), torch.zeros(2, 128, 256).bfloat16()
Q, WQ = X.to(torch.float8_e4m3fn), W.to(torch.float8_e4m3fn)
WORDS, SCALES = (TensorSpec.mn_major(128, 1, dtype=torch.int32), TensorSpec.mn_major(128, 2, dtype=torch.float32))
FP8 = dict(x=Q, w=WQ, x_scale=SCALES.zeros("cpu"), w_scale=torch.ones(2, 1, 2), recipe="fp8_block")
UE8M0 = dict(x=Q, w=WQ, x_scale=WORDS.zeros("cpu"), recipe="fp8_block")
UE8M0["w_scale"] = TensorSpec.mn_major(2, 128, 1, dtype=torch.int32).zeros("cpu")
WIDE = UE8M0 | dict(x=Q.repeat(1, 4), w=WQ.repeat(1, 1, 4), x_scale=torch.zeros(2, 128, dtype=torch.int32).T)
NARROW = dict(x=Q[:, :192].contiguous(), w=WQ[..., :192].contiguous())
PREPARE, AS_IS = "Use moe_ops.prepare_weights.", "Pass pack_scale's result as it is."
ON_THE_WAY, AT_LOAD = f"It was made contiguous on the way. {PREPARE}", "Call .contiguous() once, at load."
ONE_OF, MOVE = "Choose one of them.", "Move it with .to('cpu')."
NO_OTHER = f"Recipe {{}} has no other. {PREPARE}"
MATCH = "Quantise x with the scale_format of the prepared weights."
LABELS = "m_indices must be one expert below 2 in each block of 128 rows, -1 only behind it; got {} in row {} of a "
LABELS += "block that starts with {}. Start each expert's rows on a multiple of 128."
VALUE_ERRORS = {
    "x must be of shape (M, K); got (1, 128, 256). Pass pre_permute's result.": dict(x=X[None]),
    "w must be of shape (E, N, K); got (128, 256). " + PREPARE: dict(w=W[0]),
    f"recipe must be one of bf16, fp8_block, mxfp8, mxfp4; got 'int8'. {ONE_OF}": dict(recipe="int8"),
    "w must be of shape (E, N, K / 1) = (2, 128, 256); got (2, 128, 128). " + PREPARE: dict(w=W[..., :128]),
    f"w must be contiguous (K-major), strides (32768, 256, 1); got (32768, 1, 128). {AT_LOAD}": dict(
        w=W.transpose(1, 2).contiguous().transpose(1, 2)
    ),
    f"K of w must be a multiple of 128; got 192. Pad K with zeros. {PREPARE}": FP8 | NARROW,
    "w_scale must be None for recipe bf16; got (2, 1, 2). Drop it.": dict(w_scale=torch.ones(2, 1, 2)),
    "x_scale must be None for recipe bf16; got (128, 2). Drop it.": dict(x_scale=torch.ones(128, 2)),
    "w_scale must be given for recipe fp8_block; got None. Pass it.": FP8 | dict(w_scale=None),
    "x_scale must be given for recipe fp8_block; got None. Pass it.": FP8 | dict(x_scale=None),
    f"w_scale must be of shape (E, rows, groups) = (2, 1, 2); got (2, 2, 1). {PREPARE}": FP8
    | dict(w_scale=torch.ones(2, 2, 1)),
    f"w_scale must be contiguous, strides (2, 2, 1); got (1, 2, 2). {ON_THE_WAY}": FP8
    | dict(w_scale=torch.ones(2, 1, 2).transpose(0, 2).contiguous().transpose(0, 2)),
    f"w_scale must be of shape (E, rows, groups) = (2, 128, 1); got (2, 1, 1). {PREPARE}": UE8M0
    | dict(w_scale=torch.ones(2, 1, 1, dtype=torch.int32)),
    f"w_scale must be MN-major, strides (256, 1, 128); got (256, 2, 1). {ON_THE_WAY}": WIDE
    | dict(w_scale=torch.zeros(2, 128, 2, dtype=torch.int32)),
    f"x_scale must be in the scale format of w_scale, fp32; got ue8m0. {MATCH}": FP8 | dict(x_scale=UE8M0["x_scale"]),
    f"x_scale must be in the scale format of w_scale, ue8m0; got fp32. {MATCH}": UE8M0 | dict(x_scale=FP8["x_scale"]),
    f"x_scale must be in the scale format of w_scale, fp32; got torch.float64. {MATCH}": FP8
    | dict(x_scale=FP8["x_scale"].double()),
    "x_scale must be of shape (..., M, groups) = (128, 2); got (128, 1). Pass it beside its values.": FP8
    | dict(x_scale=torch.ones(128, 1)),
    f"x_scale must be MN-major, strides (1, 128); got (2, 1). {AS_IS}": FP8 | dict(x_scale=torch.ones(128, 2)),
    "x must be contiguous, strides (256, 1); got (1, 128). Call .contiguous() on it.": dict(x=X.T.contiguous().T),
    "M, the rows of x, must be a multiple of 128; got 100. Pad each expert's rows to a whole block.": dict(x=X[:100]),
    "m_indices must be of shape (M,) = (128,); got (64,). One expert per row, -1 for padding.": dict(rows=[0] * 64),
    f"m_indices must be on cpu; got meta. {MOVE}": dict(m_indices=torch.zeros(128, dtype=torch.int32, device="meta")),
    f"w must be on cpu; got meta. {MOVE}": dict(w=W.to("meta")),
    LABELS.format(2, 0, 2): dict(rows=[2] * 128),
    LABELS.format(1, 5, 0): dict(rows=[0] * 5 + [1] * 123),
    LABELS.format(0, 1, -1): dict(rows=[-1] + [0] * 127),
    f"backend must be one of {', '.join(BACKENDS)}; got 'cuda'. {ONE_OF}": dict(backend="cuda"),
}
TYPE_ERRORS = {
    f"w must be bfloat16; got float8_e4m3fn. That is recipe bf16. {PREPARE}": dict(w=WQ),
    "x must be bfloat16; got float32. Recipe bf16 computes in it.": dict(x=X.float()),
    f"w_scale must be float32 or int32; got float64. {NO_OTHER.format('fp8_block')}": FP8
    | dict(w_scale=FP8["w_scale"].double()),
    f"w_scale must be int32; got float32. {NO_OTHER.format('mxfp8')}": FP8 | dict(recipe="mxfp8"),
    "m_indices must be int32; got int64. Use m_indices.int().": dict(m_indices=torch.zeros(128, dtype=torch.int64)),
}
MASKED_ERRORS = {
    "x must be of shape (E, m_max, K); got (128, 256). Pass pre_permute's result.": dict(x=X),
    "x must be of E=2 slabs; got 3. One slab per expert of w.": dict(x=X[None].repeat(3, 1, 1)),
    "masked_m must be of shape (E,) = (2,); got (1,). Valid rows of each expert's slab.": dict(rows=[0]),
    f"masked_m must be on cpu; got meta. {MOVE}": dict(masked_m=torch.zeros(2, dtype=torch.int32, device="meta")),
    "masked_m must be int32; got int64. Use masked_m.int().": dict(masked_m=torch.zeros(2, dtype=torch.int64)),
    "masked_m must be between 0 and m_max=128; got -1 for expert 1. Pass pre_permute's result.": dict(rows=[3, -1]),
    "masked_m must be between 0 and m_max=128; got 129 for expert 0. Pass pre_permute's result.": dict(rows=[129, 0]),
    "expected_m must be at least 0; got -1. It is a hint: mean rows per expert.": dict(expected_m=-1),
}
REFUSED = [
    pytest.param(layout, kind, sentence, bad, id=f"{layout}-{sentence.split('. ')[0]}")
    for layout, kind, table in (
        ("contiguous", ValueError, VALUE_ERRORS),
        ("contiguous", TypeError, TYPE_ERRORS),
        ("masked", None, MASKED_ERRORS),
    )
    for sentence, bad in table.items()
]


@pytest.mark.parametrize("layout, kind, sentence, bad", REFUSED)
def test_grouped_gemm_explains_itself(layout, kind, sentence, bad, says):
    kind, bad = kind or (TypeError if "int64" in sentence else ValueError), dict(bad)
    x = X if layout == "contiguous" else X[None].repeat(2, 1, 1)
    rows = torch.tensor(bad.pop("rows", [0] * (128 if layout == "contiguous" else 2)), dtype=torch.int32)
    with says(kind, f"grouped_gemm_{layout}: {sentence}"):
        OPS[layout](**dict(x=x, x_scale=None, w=W, w_scale=None, recipe="bf16") | {ROW_MAP[layout]: rows} | bad)


@pytest.mark.parametrize("name", ["x", "w"])
@each_layout
def test_grouped_gemm_explains_itself_about_gradients(layout, name, refuses_gradients):
    x = X if layout == "contiguous" else X[None].repeat(2, 1, 1)
    arguments = dict(x=x, x_scale=None, w=W, w_scale=None, recipe="bf16")
    arguments[ROW_MAP[layout]] = torch.zeros(len(x), dtype=torch.int32)
    refuses_gradients(f"grouped_gemm_{layout}", OPS[layout], arguments, name)


def test_grouped_gemm_explains_itself_about_workspaces(arena, says):
    sizes = dict(T=3, top_k=2, E=2, K=256, I=128, recipe="bf16", scale_format="none", layout="masked")
    space = arena(**sizes)
    ids, w2 = torch.zeros(3, 2, dtype=torch.int32), torch.zeros(2, 256, 128).bfloat16()

    def run(ws, w, **changed):
        torch.ops.moe.grouped_gemm_ws(ws, ids, w, None, None, None, 0, **space.sizes | changed)

    space.put("masked_m", torch.zeros(2, dtype=torch.int32))
    run(space.ws, w2)
    names = ", ".join(LAYOUTS)
    with says(ValueError, f"grouped_gemm_ws: layout must be one of {names}; got 'dense'. {ONE_OF}"):
        run(space.ws, w2, layout="dense")
    with says(ValueError, "grouped_gemm_ws: T must be at least 0; got -1. It counts tokens."):
        run(space.ws, w2, T=-1)
    inside = space.ws[: w2.nbytes].view(torch.bfloat16).view(w2.shape)
    fix = "Give the workspace memory of its own."
    with says(ValueError, f"grouped_gemm_ws: workspace must be apart from every input; got an overlap with one. {fix}"):
        run(space.ws, inside)
