"""moe::quantize against a search over the code tables, group by group."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_ops import quantize
from moe_ops.backends import BACKENDS
from moe_ops.testing import assert_bits_equal
from moe_ops.testing.decode import decode_e2m1, decode_e4m3, decode_words

SWEEP = settings.get_profile("ops")

FP32 = 2.0**-23  # one float32 step, relative: two roundings of half a step in amax * (1 / top)
HALF_STEP = {"e4m3": 2.0**-4, "e2m1": 2.0**-2}  # of a normal value, relative: half of 2^-3 and of 2^-1
HALF_SUBNORMAL = {"e4m3": 2.0**-10, "e2m1": 2.0**-2}  # in units of the scale
TOP = {"e4m3": 448.0, "e2m1": 6.0}
NAMES = ("granularity", "dtype", "scale_format")
FORMS = [(g, d, s) for g in ("token", "block") for d in ("e4m3", "e2m1") for s in ("fp32", "ue8m0")]
each_form = pytest.mark.parametrize(NAMES, FORMS, ids=["-".join(form) for form in FORMS])


def wide(*shape, seed=0, dtype=torch.float32, spread=6) -> torch.Tensor:
    """Normal values with magnitudes spread over many powers of two; both kinds of zero among them."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator) * 2.0 ** torch.randint(-spread, spread, shape, generator=generator)
    x[torch.rand(shape, generator=generator) < 0.05] = 0.0
    x[torch.rand(shape, generator=generator) < 0.05] = -0.0
    return x.to(dtype)


def codes_of(q: torch.Tensor, dtype: str) -> torch.Tensor:
    """(..., K) codes: bytes of e4m3, nibbles of e2m1 with the even column low."""
    byte = q.view(torch.uint8).long()
    return byte if dtype == "e4m3" else torch.stack((byte % 16, byte // 16), -1).flatten(-2)


def values_of(q: torch.Tensor, dtype: str) -> torch.Tensor:
    return decode_e4m3(q) if dtype == "e4m3" else decode_e2m1(q)


def scales_of(scale: torch.Tensor, groups: int) -> torch.Tensor:
    return decode_words(scale, groups) if scale.dtype == torch.int32 else scale.double()


def spread_out(scale: torch.Tensor, shape, granularity: str, group: int) -> torch.Tensor:
    """The scale of each value."""
    row = torch.arange(shape[-2]) // (group if granularity == "block" else 1)
    return scale[..., row, :][..., torch.arange(shape[-1]) // group]


def assert_right(x, q, scale, nearest, *, granularity="token", group=128, dtype="e4m3", scale_format="fp32"):
    """Every scale by the rule, and every code the nearest to value / scale."""
    rows = group if granularity == "block" else 1
    got = scales_of(scale, -(-x.shape[-1] // group))
    finite = torch.where(x.isfinite(), x.double().abs(), 0.0)
    for index in torch.cartesian_prod(*(torch.arange(size) for size in got.shape)).tolist():
        *batch, r, g = index
        amax = float(finite[(*batch, slice(r * rows, r * rows + rows), slice(g * group, g * group + group))].max())
        if scale_format == "ue8m0":
            assert got[tuple(index)] == 2.0 ** (nearest.exponent(amax, TOP[dtype]) - 127), (index, amax)
        else:
            want = max(amax, 1e-10) / TOP[dtype]
            assert abs(got[tuple(index)] - want) <= FP32 * want, (index, amax)
    quotient = (x.double() / spread_out(got, x.shape, granularity, group)).float()
    codes, here = codes_of(q, dtype), x.isfinite()
    want = getattr(nearest, dtype)(quotient.double())
    wrong = (codes != want) & here
    assert not wrong.any(), (
        f"{int(wrong.sum())} codes, first at {wrong.nonzero()[0]}: {codes[wrong][0]}, {want[wrong][0]}"
    )
    if dtype == "e4m3":
        assert (codes[~here] % 128 == 127).all(), "a value that is not finite is not NaN"
    else:
        assert (codes[~here] % 8 == 7).all(), "a value that is not finite does not saturate"


SHAPES = [(5, 384), (3, 6, 1280), (1, 128), (0, 256), (2, 0, 128)]


@pytest.mark.parametrize(
    (*NAMES, "shape"), [(*form, SHAPES[(i + j) % 5]) for i, form in enumerate(FORMS) for j in (0, 2)], ids=str
)
def test_quantize_meets_its_contract(granularity, dtype, scale_format, shape, meets_contract):
    *batch, M, K = shape
    G, column = K // 128, -(-M // 4) * 4
    values = (shape, torch.float8_e4m3fn, (*([M * K] if batch else []), K, 1))
    if dtype == "e2m1":
        values = ((*batch, M, K // 2), torch.int8, (*([M * K // 2] if batch else []), K // 2, 1))
    if granularity == "block":
        R = -(-M // 128)
        scales = ((*batch, R, G), torch.float32, (*([R * G] if batch else []), G, 1))
    else:
        G, kind = (G, torch.float32) if scale_format == "fp32" else (-(-G // 4), torch.int32)
        scales = ((*batch, M, G), kind, (*([column * G] if batch else []), 1, column))
    form = dict(granularity=granularity, dtype=dtype, scale_format=scale_format)
    meets_contract(torch.ops.moe.quantize.default, (values, scales), wide(*shape), **form)
    meets_contract(
        torch.ops.moe.quantize_ws.default, (), wide(*shape), ws=torch.zeros(32768, dtype=torch.uint8), **form
    )


@pytest.mark.parametrize("x_dtype", [torch.bfloat16, torch.float16, torch.float32], ids=lambda d: str(d)[6:])
@each_form
def test_quantize_matches_reference(granularity, dtype, scale_format, x_dtype, nearest, packed_form_agrees):
    form = dict(granularity=granularity, dtype=dtype, scale_format=scale_format, group=64)
    x = wide(2, 9, 320, dtype=x_dtype)
    q, scale = quantize(x, **form)
    assert_right(x, q, scale, nearest, **form)
    packed_form_agrees("quantize", (q, scale), x, **form)


@SWEEP
@given(
    form=st.sampled_from(FORMS),
    M=st.integers(0, 7),
    G=st.integers(1, 5),
    group=st.sampled_from((16, 32, 64)),
    ragged=st.integers(0, 7),
    seed=st.integers(0, 2**31),
)
def test_quantize_matches_reference_sweep(form, M, G, group, ragged, seed, nearest):
    form = dict(zip(NAMES, form, strict=True), group=group)
    K = G * group - (2 * ragged if form["granularity"] == "block" else 0)
    x = wide(M, K, seed=seed, spread=30)
    assert_right(x, *quantize(x, **form), nearest, **form)


@pytest.mark.parametrize("dtype", ["e4m3", "e2m1"])
def test_quantize_edges_ties_go_to_the_even_code(dtype, nearest):
    table = decode_e4m3(torch.arange(127, dtype=torch.uint8)) if dtype == "e4m3" else decode_e2m1(torch.arange(8))
    table = table.unique()
    points = torch.cat((table, (table[1:] + table[:-1]) / 2))
    points = torch.cat((points, -points))
    x = torch.zeros(1, 512)
    x[0, : len(points)], x[:, 256], x[:, 0] = points, TOP[dtype], TOP[dtype]  # scale 1 in both groups of 256
    q, scale = quantize(x, group=256, dtype=dtype, scale_format="ue8m0")
    assert scale.tolist() == [[127 | 127 << 8]]
    assert_right(x, q, scale, nearest, group=256, dtype=dtype, scale_format="ue8m0")


@pytest.mark.parametrize("mantissa", [1.0, 1.0 + 2**-22, 1.01, 1.5, 1.6, 1.75, 1.99, 2.0 - 2**-22])
@pytest.mark.parametrize("dtype", ["e4m3", "e2m1"])
def test_quantize_edges_scale_is_rounded_before_the_values(dtype, mantissa, nearest):
    """Neither inflated (values divided by the exact scale) nor saturated (scale rounded down)."""
    for n in (-30, -1, 0, 7):
        amax = TOP[dtype] * mantissa * 2.0**n
        x = torch.linspace(-amax, amax, 128)[None]
        for scale_format in ("fp32", "ue8m0"):
            form = dict(dtype=dtype, scale_format=scale_format)
            q, scale = quantize(x, **form)
            assert_right(x, q, scale, nearest, **form)
            step = HALF_STEP[dtype] * x.abs().double() + HALF_SUBNORMAL[dtype] * scales_of(scale, 1)
            error = (values_of(q, dtype) * scales_of(scale, 1) - x.double()).abs()
            assert (error <= step * (1 + 2 * FP32)).all(), (n, scale_format)


@each_form
def test_quantize_edges_zeros_get_a_finite_scale(granularity, dtype, scale_format, nearest):
    x = wide(128, 512)
    x[5] = 0.0
    x[:, 128:256] = 0.0
    form = dict(granularity=granularity, dtype=dtype, scale_format=scale_format)
    q, scale = quantize(x, **form)
    assert_right(x, q, scale, nearest, **form)
    assert (values_of(q, dtype)[:, 128:256] == 0).all()
    zero = scales_of(scale, 4)[0, 1]
    assert zero == (2.0 ** (nearest.exponent(0.0, TOP[dtype]) - 127) if scale_format == "ue8m0" else scale[0, 1])
    if (dtype, scale_format) == ("e4m3", "ue8m0"):
        assert zero == 2.0**-42  # the byte 85 that a floor of 1e-10 gives in every implementation


@each_form
def test_quantize_edges_one_bad_value_does_not_spoil_its_group(granularity, dtype, scale_format, nearest):
    form = dict(granularity=granularity, dtype=dtype, scale_format=scale_format, group=32)
    x = wide(2, 128)
    x[0, 3], x[0, 40], x[0, 41], x[1, 64:96] = float("nan"), float("inf"), -float("inf"), float("nan")
    q, scale = quantize(x, **form)
    assert_right(x, q, scale, nearest, **form)
    q0, scale0 = quantize(torch.where(x.isfinite(), x, 0.0), **form)
    assert_bits_equal(scale, scale0, "scale")
    same = (codes_of(q, dtype) == codes_of(q0, dtype)) | ~x.isfinite()
    assert same.all()
    if dtype == "e2m1":
        assert values_of(q, dtype)[0, [40, 41]].tolist() == [6.0, -6.0]


@pytest.mark.parametrize("amax", [1e-3, 6e-8, 65504.0])
@pytest.mark.parametrize("scale_format", ["fp32", "ue8m0"])
def test_quantize_edges_fp16_is_computed_in_fp32(scale_format, amax, nearest):
    """The multiplier 2^(127 - byte) of a small group is above what fp16 holds."""
    x = (torch.linspace(-1, 1, 128) * amax).half()[None]
    q, scale = quantize(x, scale_format=scale_format)
    assert_right(x, q, scale, nearest, scale_format=scale_format)
    assert_bits_equal(q, quantize(x.float(), scale_format=scale_format)[0])


@pytest.mark.parametrize("G", [1, 3, 4, 5, 33])
def test_quantize_edges_any_number_of_groups(G, nearest):
    x = wide(3, 16 * G)
    form = dict(group=16, scale_format="ue8m0")
    q, scale = quantize(x, **form)
    assert_right(x, q, scale, nearest, **form)
    byte = [[scale[m, g // 4].item() >> 8 * (g % 4) & 255 for g in range(4 * scale.shape[1])] for m in range(3)]
    assert all(value == 0 for row in byte for value in row[G:]), "bytes past G are not 0"


def test_quantize_edges_more_rows_than_a_grid_axis():
    x = wide(65537, 16)
    q, scale = quantize(x, group=16)
    tail_q, tail_scale = quantize(x[-3:], group=16)
    assert_bits_equal(q[-3:], tail_q)
    assert_bits_equal(scale[-3:], tail_scale)


def test_quantize_edges_strided_input(nearest):
    x = wide(256, 5).T
    q, scale = quantize(x)
    assert_right(x, q, scale, nearest)
    assert_bits_equal(q, quantize(x.contiguous())[0])


def test_quantize_edges_a_row_does_not_depend_on_its_batch():
    x = wide(7, 256)
    q, scale = quantize(x, scale_format="ue8m0")
    for m in range(7):
        alone_q, alone_scale = quantize(x[m : m + 1], scale_format="ue8m0")
        assert_bits_equal(q[m : m + 1], alone_q)
        assert_bits_equal(scale[m : m + 1], alone_scale)


@pytest.mark.parametrize("shape", [(5, 128), (2, 7, 640), (0, 128)], ids=str)
@each_form
def test_quantize_touches_nothing_else(granularity, dtype, scale_format, shape, unchanged, packed_form_agrees):
    form = dict(granularity=granularity, dtype=dtype, scale_format=scale_format)
    x = wide(*shape)
    with unchanged(x):
        results = quantize(x, **form)
        packed_form_agrees("quantize", results, x, **form)


X = torch.ones(3, 256)
ONE_OF = "Choose one of them."
VALUE_ERRORS = {
    "x must be of 2 or 3 axes; got (8,). Flatten or unsqueeze it.": dict(x=X[0, :8]),
    f"granularity must be one of token, block; got 'row'. {ONE_OF}": dict(granularity="row"),
    f"dtype must be one of e4m3, e2m1; got 'e5m2'. {ONE_OF}": dict(dtype="e5m2"),
    f"scale_format must be one of fp32, ue8m0; got 'none'. {ONE_OF}": dict(scale_format="none"),
    f"group must be one of 16, 32, 64, 128, 256; got 48. {ONE_OF}": dict(group=48),
    "the last axis of x must be a multiple of 32; got 48. Pad it with zeros, or choose a smaller group.": dict(
        x=X[:, :48], group=32
    ),
    "the last axis of x must be a multiple of 2; got 33. Two e2m1 values share a byte.": dict(
        x=X[:, :33], dtype="e2m1", granularity="block"
    ),
    f"backend must be one of {', '.join(BACKENDS)}; got 'cuda'. {ONE_OF}": dict(backend="cuda"),
}
TYPE_ERRORS = {"x must be bfloat16 or float16 or float32; got int32. Cast it first.": dict(x=X.int())}
REFUSED = [
    pytest.param(kind, sentence, bad, id=sentence.split(";")[0])
    for kind, table in ((ValueError, VALUE_ERRORS), (TypeError, TYPE_ERRORS))
    for sentence, bad in table.items()
]


@pytest.mark.parametrize("kind, sentence, bad", REFUSED)
def test_quantize_explains_itself(kind, sentence, bad, says):
    with says(kind, f"quantize: {sentence}"):
        quantize(**{"x": X, **bad})


def test_quantize_explains_itself_about_workspaces(says):
    run = torch.ops.moe.quantize_ws
    remedy = "It holds the results one after another, each at a multiple of 256 bytes."
    with says(ValueError, f"quantize_ws: workspace must be at least 1024 bytes; got 1023. {remedy}"):
        run(torch.empty(1023, dtype=torch.uint8), X)
    with says(
        TypeError, "quantize_ws: workspace must be uint8; got int8. Allocate torch.empty(bytes, dtype=torch.uint8)."
    ):
        run(torch.empty(2048, dtype=torch.int8), X)
    with says(ValueError, "quantize_ws: workspace must be flat and contiguous; got (4, 512). Use one flat tensor."):
        run(torch.empty(4, 512, dtype=torch.uint8), X)
    slice_ = torch.empty(4096, dtype=torch.uint8)[1:]
    rule = "workspace must be at an address divisible by 64; got remainder 1. Pass a tensor of its own, not a slice."
    with says(ValueError, f"quantize_ws: {rule}"):
        run(slice_, X)
    ws = torch.zeros(4096, dtype=torch.uint8)
    rule = "workspace must be apart from every input; got an overlap with one. Give the workspace memory of its own."
    with says(ValueError, f"quantize_ws: {rule}"):
        run(ws, ws[:1024].view(torch.float32).view(2, 128))


def test_quantize_explains_itself_about_gradients(refuses_gradients):
    refuses_gradients("quantize", quantize, dict(x=X), "x")
