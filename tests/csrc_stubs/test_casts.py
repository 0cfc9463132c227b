"""Casts against the nearest code by search, and the properties their scales must have."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moe_ops.csrc_stubs import deep_gemm
from moe_ops.csrc_stubs.deep_gemm import utils

EXAMPLES = settings(
    max_examples=60,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)


def nearest(values: torch.Tensor, table: list[float]) -> torch.Tensor:
    """Index of the closest entry of an ascending table, ties to the even one, magnitudes only."""
    result = []
    for value in values.abs().flatten().tolist():
        distance = [abs(value - entry) for entry in table]
        ties = [code for code, d in enumerate(distance) if d == min(distance)]
        result.append(min(ties, key=lambda code: code % 2))
    return torch.tensor(result).view(values.shape)


@EXAMPLES
@given(bits=st.integers(0, 0x7F7FFFFF), negative=st.booleans())
def test_ceil_to_ue8m0(bits, negative):
    value = torch.tensor(bits, dtype=torch.int32).view(torch.float32)
    want = 2.0**-126
    while want < min(float(value), 2.0**127):
        want *= 2
    assert float(deep_gemm.ceil_to_ue8m0(-value if negative else value)) == want


@pytest.mark.parametrize(
    "x, y, quotient, aligned",
    [(0, 4, 0, 0), (1, 4, 1, 4), (8, 4, 2, 8), (9, 4, 3, 12)],
)
def test_integers(x, y, quotient, aligned):
    assert deep_gemm.ceil_div(x, y) == quotient
    assert deep_gemm.align(x, y) == aligned


def test_row_major_packing_round_trip(random):
    sf = random.powers(3, 8)
    packed = deep_gemm.pack_ue8m0_to_int(sf)
    assert packed.shape == (3, 2) and packed.is_contiguous()
    assert torch.equal(deep_gemm.unpack_ue8m0_from_int(packed), sf)
    assert int(packed[0, 0]) & 255 == int(sf[0, 0].log2()) + 127
    edges = torch.tensor([[0x00FF01FE]], dtype=torch.int32)
    want = [2.0**127, 2.0**-126, float("inf"), 0.0]
    assert deep_gemm.unpack_ue8m0_from_int(edges).tolist() == [want]


@pytest.mark.parametrize("shape", [(1, 128), (5, 96), (3, 384), (4, 1)], ids=str)
@pytest.mark.parametrize("gran_k", [32, 128])
@pytest.mark.parametrize("use_ue8m0", [False, True])
@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float32], ids=str)
def test_per_token_cast_to_fp8(shape, gran_k, use_ue8m0, kind, reference):
    x = (torch.randn(shape) * 10).to(kind)
    x[0, :gran_k] = 0
    q, sf = deep_gemm.per_token_cast_to_fp8(x, use_ue8m0, gran_k)
    assert q.shape == x.shape and q.dtype == torch.float8_e4m3fn and q.is_contiguous()
    assert sf.shape == (shape[0], -(-shape[1] // gran_k))
    table = [reference.e4m3(byte) for byte in range(127)]
    for i in range(shape[0]):
        for g in range(sf.size(1)):
            group = x[i, g * gran_k : (g + 1) * gran_k].float()
            scale = torch.clamp(group.abs().max(), min=1e-4) / 448
            if use_ue8m0:
                scale = 2.0 ** torch.ceil(scale.double().log2())
            assert float(sf[i, g]) == float(scale)
            codes = nearest(group * (1 / sf[i, g]), table)
            got = q[i, g * gran_k : (g + 1) * gran_k].view(torch.uint8)
            assert torch.equal((got & 127).long(), codes)
            assert torch.equal(got >> 7 != 0, torch.signbit(group))


@pytest.mark.parametrize("name", ["per_token_cast_to_fp8", "per_token_cast_to_fp4"])
def test_scale_is_rounded_before_the_values(name):
    """amax / 448 just above a power of two: values stay within a step, not inflated up to 2x."""
    top = 448.0 if name.endswith("fp8") else 6.0
    x = torch.linspace(-1, 1, 128)[None] * top * 1.01
    cast_back = getattr(deep_gemm, name.replace("per_token_cast_to", "cast_back_from"))
    q, sf = getattr(deep_gemm, name)(x, True)
    step, least = (1 / 16, 2.0**-10) if name.endswith("fp8") else (1 / 4, 1 / 4)
    assert ((cast_back(q, sf) - x).abs() <= step * x.abs() + least * sf).all()


@pytest.mark.parametrize("amax", [1.6, 1.75, 1.99, 448.0, 1e30, 3e-5])
def test_no_value_saturates(amax):
    for use_ue8m0 in (False, True):
        q, sf = deep_gemm.per_token_cast_to_fp8(torch.full((1, 128), amax), use_ue8m0)
        assert float(q[0, 0].float() * sf[0, 0]) == pytest.approx(amax, rel=1 / 16)


def test_zero_group_has_a_finite_scale():
    x = torch.zeros(2, 256)
    x[0, :128] = 1
    for cast in (deep_gemm.per_token_cast_to_fp8, deep_gemm.per_token_cast_to_fp4):
        q, sf = cast(x, True)
        assert (q[1].view(torch.uint8) == 0).all()
        assert sf.isfinite().all() and (sf > 0).all()
    assert float(sf[1, 0]) == 2.0**-15  # ceil(1e-4 / 6)


@pytest.mark.parametrize("name, per_byte", [("fp8", 1), ("fp4", 2)])
@pytest.mark.parametrize("width", [32, 64, 128, 160])
def test_packed_scales_are_the_plain_ones(name, per_byte, width):
    cast = getattr(deep_gemm, f"per_token_cast_to_{name}")
    back = getattr(deep_gemm, f"cast_back_from_{name}")
    x = torch.randn(3, width)
    q, sf = cast(x, True, 32)
    q_packed, words = cast(x, True, 32, True)
    assert torch.equal(q.view(torch.uint8), q_packed.view(torch.uint8))
    assert q.shape == (3, width // per_byte)
    assert words.shape == (3, -(-width // 128))
    plain = deep_gemm.unpack_ue8m0_from_int(words)
    assert torch.equal(plain[:, : sf.size(1)], sf)
    assert (plain[:, sf.size(1) :] == 1).all()
    assert torch.equal(back(q, sf, 32), back(q, words, 32, True))


def test_per_token_cast_to_fp4(reference):
    table = [reference.e2m1(code) for code in range(8)]
    ties = [(table[i] + table[i + 1]) / 2 for i in range(7)]
    x = torch.tensor([ties + [6.0], [-t for t in ties] + [-6.0], torch.randn(8).tolist()])
    x[2, 0] = 6.0  # every row's scale is 1, so values are what was put in
    q, sf = deep_gemm.per_token_cast_to_fp4(x, True, 32)
    assert q.dtype == torch.int8 and (sf == 1).all()
    byte = q.view(torch.uint8).long()
    codes = torch.stack([byte & 15, byte >> 4], -1).flatten(1)
    assert torch.equal(codes & 7, nearest(x, table))
    assert torch.equal(codes >> 3 != 0, (x < 0) & (codes & 7 != 0))
    back = deep_gemm.cast_back_from_fp4(q, sf, 32)
    assert back.tolist() == [[reference.e2m1(int(code)) for code in row] for row in codes]


def test_transpose_packed_fp4(random):
    packed = random.e2m1(6, 4)
    ones = torch.ones(8, 1)
    unpacked = deep_gemm.cast_back_from_fp4(packed, ones[:6], 8)
    transposed = deep_gemm.transpose_packed_fp4(packed)
    assert transposed.shape == (8, 3) and transposed.is_contiguous()
    assert torch.equal(deep_gemm.cast_back_from_fp4(transposed, ones, 6), unpacked.mT)
    assert torch.equal(deep_gemm.transpose_packed_fp4(transposed), packed)


@pytest.mark.parametrize("shape", [(128, 128), (130, 200), (1, 300)], ids=str)
def test_per_block_cast_to_fp8(shape):
    x = torch.randn(shape)
    q, sf = deep_gemm.per_block_cast_to_fp8(x, False)
    assert q.shape == shape and sf.shape == (-(-shape[0] // 128), -(-shape[1] // 128))
    for i in range(sf.size(0)):
        for j in range(sf.size(1)):
            block = (slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128))
            assert float(sf[i, j]) == float(x[block].abs().max() / 448)
            error = (q[block].float() * sf[i, j] - x[block]).abs()
            assert (error <= x[block].abs() / 16 + sf[i, j] * 2.0**-10).all()


def test_per_channel_and_custom_dims():
    x = torch.randn(256, 3)
    q, sf = deep_gemm.per_channel_cast_to_fp8(x, True)
    by_rows, sf_rows = deep_gemm.per_token_cast_to_fp8(x.mT.contiguous(), True)
    assert torch.equal(sf, sf_rows.mT)
    assert torch.equal(q.view(torch.uint8), by_rows.view(torch.uint8).mT)
    y = torch.randn(4, 5, 6)
    q, sf = deep_gemm.per_custom_dims_cast_to_fp8(y, (1,), False)
    assert sf.shape == (5,)
    assert torch.equal(sf, y.abs().amax((0, 2)) / 448)
    assert q.shape == y.shape


def test_casts_explain_themselves(random, refuses):
    x = torch.randn(3, 8)
    for name in ("per_token_cast_to_fp8", "per_token_cast_to_fp4"):
        with refuses(
            f"{name}: use_ue8m0 must be True with use_packed_ue8m0; got False.",
            "Only powers of two can be packed.",
        ):
            getattr(utils, name)(x, False, 32, True)
    for name in (
        "per_token_cast_to_fp8",
        "per_token_cast_to_fp4",
        "per_block_cast_to_fp8",
        "per_channel_cast_to_fp8",
    ):
        with refuses(f"{name}: x must be (m, n), 2-D; got shape (8). Reshape it."):
            getattr(utils, name)(x[0], True)
    with refuses(
        "per_channel_cast_to_fp8: x must be in whole groups of 128 rows; got 3 rows.",
        "Pad it with zeros.",
    ):
        utils.per_channel_cast_to_fp8(x, True)
    with refuses("per_token_cast_to_fp4: x must be of even width; got 7. Pad it with zeros."):
        utils.per_token_cast_to_fp4(x[:, :7], True)
    with refuses("transpose_packed_fp4: a must be (m, n / 2), 2-D; got shape (8). Reshape it."):
        utils.transpose_packed_fp4(x[0].to(torch.int8))
    with refuses(
        "transpose_packed_fp4: a must be int8; got uint8. View it with .view(torch.int8).",
        kind=TypeError,
    ):
        utils.transpose_packed_fp4(x.to(torch.uint8))
    with refuses("transpose_packed_fp4: a must be of even height; got 3. Pad it with zeros."):
        utils.transpose_packed_fp4(x.to(torch.int8))


def test_row_major_packing_explains_itself(random, refuses):
    op, sf = "pack_ue8m0_to_int", random.powers(2, 8)
    with refuses(
        f"{op}: x must be float32; got float64. Convert it with .float().",
        kind=TypeError,
    ):
        utils.pack_ue8m0_to_int(sf.double())
    with refuses(
        f"{op}: x must be in fours along the last dimension; got 7. Pad it with ones.",
    ):
        utils.pack_ue8m0_to_int(sf[:, :7])
    sf[1, 3] = 0.75
    with refuses(
        f"{op}: x[1, 3] must be a positive power of two; got 0.75.",
        "Round it up with ceil_to_ue8m0 before quantising.",
    ):
        utils.pack_ue8m0_to_int(sf)
