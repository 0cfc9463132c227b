"""moe::pack_scale against a loop that places one byte, or one float, at a time."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_ops import pack_scale
from moe_ops.backends import BACKENDS
from moe_ops.testing import assert_bits_equal

SWEEP = settings.get_profile("ops")
KINDS = ("float32", "uint8", "float8_e8m0fnu", "copied")


def random_bytes(*shape, seed=0) -> torch.Tensor:
    """Exponent bytes 1 to 254: those of normal float32 powers of two."""
    return torch.randint(1, 255, shape, generator=torch.Generator().manual_seed(seed)).to(torch.uint8)


def scale_of(byte: torch.Tensor, kind: str) -> torch.Tensor:
    """The same scales as fp32 powers of two, or as bytes of either dtype."""
    if kind == "float32":
        flat = [math.ldexp(1.0, value - 127) for value in byte.flatten().tolist()]
        return torch.tensor(flat).view(byte.shape)
    return byte.view(getattr(torch, kind))


def words_by_loop(byte: torch.Tensor, mn: int, rows_per_scale: int) -> list:
    """[batch][m][word]: byte b of word c is the exponent of group 4c + b."""
    byte = byte if byte.dim() == 3 else byte[None]
    E, _, G = byte.shape
    words = [[[0] * math.ceil(G / 4) for _ in range(mn)] for _ in range(E)]
    for e in range(E):
        for m in range(mn):
            for g in range(G):
                words[e][m][g // 4] |= int(byte[e, m // rows_per_scale, g]) << 8 * (g % 4)
    return words


def unsigned(packed: torch.Tensor) -> list:
    packed = packed if packed.dim() == 3 else packed[None]
    return (packed.long() % 2**32).tolist()


@pytest.mark.parametrize("mn, batch", [(0, ()), (1, ()), (5, ()), (5, (3,)), (8, (0,))], ids=str)
@pytest.mark.parametrize("kind", ["float32", "uint8", "copied"])
def test_pack_scale_meets_its_contract(kind, batch, mn, meets_contract):
    byte, column = random_bytes(*batch, mn, 5), (mn + 3) // 4 * 4
    scale, scale_format = (scale_of(byte, kind), "ue8m0") if kind != "copied" else (torch.rand(*batch, mn, 5), "fp32")
    width, dtype = (2, torch.int32) if scale_format == "ue8m0" else (5, torch.float32)
    wanted = (((*batch, mn, width), dtype, (*(column * width for _ in batch), 1, column)),)
    meets_contract(torch.ops.moe.pack_scale.default, wanted, scale, mn, scale_format=scale_format)
    ws = torch.zeros(2048, dtype=torch.uint8)
    meets_contract(torch.ops.moe.pack_scale_ws.default, (), scale, mn, ws=ws, scale_format=scale_format)


@pytest.mark.parametrize("kind", ["float32", "uint8", "float8_e8m0fnu"])
@pytest.mark.parametrize("rows_per_scale", [1, 128])
@pytest.mark.parametrize("K", [512, 1024, 640], ids="K{}".format)
def test_pack_scale_matches_reference(K, rows_per_scale, kind, packed_form_agrees):
    """Packed widths 1 and 2, whole and with bytes missing: one word hides a wrong major axis."""
    mn = 130
    byte = random_bytes(2, math.ceil(mn / rows_per_scale), K // 128)
    scale = scale_of(byte, kind)
    packed = pack_scale(scale, mn, rows_per_scale=rows_per_scale)
    assert unsigned(packed) == words_by_loop(byte, mn, rows_per_scale)
    if kind != "float8_e8m0fnu":
        packed_form_agrees("pack_scale", packed, scale, mn, rows_per_scale=rows_per_scale)


@SWEEP
@given(
    mn=st.integers(0, 40),
    G=st.integers(1, 33),
    E=st.integers(0, 3),
    rows_per_scale=st.sampled_from((1, 3, 16, 128)),
    kind=st.sampled_from(("float32", "uint8", "float8_e8m0fnu")),
    seed=st.integers(0, 2**31),
)
def test_pack_scale_matches_reference_sweep(mn, G, E, rows_per_scale, kind, seed):
    byte = random_bytes(*([E] if E else []), math.ceil(mn / rows_per_scale), G, seed=seed)
    packed = pack_scale(scale_of(byte, kind), mn, rows_per_scale=rows_per_scale)
    assert unsigned(packed) == words_by_loop(byte, mn, rows_per_scale)


@pytest.mark.parametrize("rows_per_scale", [1, 4])
def test_pack_scale_matches_reference_fp32_values_as_they_are(rows_per_scale, packed_form_agrees):
    scale = torch.randn(2, math.ceil(9 / rows_per_scale), 3)  # any value: this format rounds nothing
    scale[0, 0, 0] = float("nan")
    form = dict(rows_per_scale=rows_per_scale, scale_format="fp32")
    packed = pack_scale(scale, 9, **form)
    for m in range(9):
        assert_bits_equal(packed[:, m], scale[:, m // rows_per_scale])
    packed_form_agrees("pack_scale", packed, scale, 9, **form)


@pytest.mark.parametrize("G", [1, 3, 4, 5, 33])
def test_pack_scale_edges_bytes_past_the_groups_are_zero(G):
    (words,) = unsigned(pack_scale(torch.full((2, G), 255, dtype=torch.uint8), 2))
    for row in words:
        byte = [row[g // 4] >> 8 * (g % 4) & 255 for g in range(4 * len(row))]
        assert byte == [255] * G + [0] * (len(byte) - G)


def test_pack_scale_edges_every_normal_power_of_two():
    byte = torch.arange(1, 255).to(torch.uint8)[None]
    assert unsigned(pack_scale(scale_of(byte, "float32"), 1)) == words_by_loop(byte, 1, 1)


def test_pack_scale_edges_every_byte_is_taken_as_it_is():
    byte = torch.arange(256).to(torch.uint8)[None]
    assert unsigned(pack_scale(byte, 1)) == words_by_loop(byte, 1, 1)


@pytest.mark.parametrize("kind", ["float32", "uint8"])
def test_pack_scale_edges_strided_input(kind):
    byte = random_bytes(5, 7).T
    assert unsigned(pack_scale(scale_of(byte.contiguous(), kind).T.contiguous().T, 7)) == words_by_loop(byte, 7, 1)


@pytest.mark.parametrize("kind", KINDS)
def test_pack_scale_touches_nothing_else(kind, unchanged, packed_form_agrees):
    byte = random_bytes(2, 5, 6)
    scale, scale_format = (scale_of(byte, kind), "ue8m0") if kind != "copied" else (torch.rand(2, 5, 6), "fp32")
    with unchanged(scale):
        packed = pack_scale(scale, 5, scale_format=scale_format)
        packed_form_agrees("pack_scale", packed, scale, 5, scale_format=scale_format)


ONES = torch.ones(4, 4)
ROWS = (
    "scale must be of ceil(mn / rows_per_scale) rows; got 4 rows for mn={}, rows_per_scale={}. "
    "Check that the scale belongs to this tensor."
)
ONE_OF = "Choose one of them."
VALUE_ERRORS = {
    "scale must be of 2 or 3 axes; got (4,). Flatten or unsqueeze it.": dict(scale=ONES[0]),
    f"scale_format must be one of fp32, ue8m0; got 'none'. {ONE_OF}": dict(scale_format="none"),
    "rows_per_scale must be at least 1; got 0. 1 means a scale per row.": dict(rows_per_scale=0),
    "scale must be of at least one group; got (4, 0). Skip the call.": dict(scale=ONES[:, :0]),
    ROWS.format(5, 1): dict(mn=5),
    ROWS.format(513, 128): dict(mn=513, rows_per_scale=128),
    f"backend must be one of {', '.join(BACKENDS)}; got 'cuda'. {ONE_OF}": dict(backend="cuda"),
}
BYTES = "Exponent bytes can only be packed as ue8m0."
TYPE_ERRORS = {
    f"scale must be float32 or uint8 or float8_e8m0fnu; got float64. {BYTES}": dict(scale=ONES.double()),
    f"scale must be float32; got uint8. {BYTES}": dict(scale=ONES.to(torch.uint8), scale_format="fp32"),
}
REFUSED = [
    pytest.param(kind, sentence, bad, id=sentence.split(";")[0])
    for kind, table in ((ValueError, VALUE_ERRORS), (TypeError, TYPE_ERRORS))
    for sentence, bad in table.items()
]


@pytest.mark.parametrize("kind, sentence, bad", REFUSED)
def test_pack_scale_explains_itself(kind, sentence, bad, says):
    with says(kind, f"pack_scale: {sentence}"):
        pack_scale(**{"scale": ONES, "mn": 4, **bad})


@pytest.mark.parametrize("value", [1.99, 1.5, 3.0, 0.0, -1.0, -2.0, float("inf"), float("nan"), 2.0**-130])
@pytest.mark.parametrize("at", [(0, 0), (3, 2)], ids=str)
def test_pack_scale_explains_itself_about_scales_that_are_no_powers_of_two(at, value, says):
    """Never truncated, and never leaking mantissa bits into the byte beside."""
    scale = ONES.clone()
    scale[at] = value
    got = scale[at].item()
    sentence = (
        f"pack_scale: scale must be positive powers of two for ue8m0; got {got!r} at {at}. "
        "Requantise the values with power-of-two scales: moe_ops.quantize(..., scale_format='ue8m0')."
    )
    with says(ValueError, sentence):
        pack_scale(scale, 4)


def test_pack_scale_explains_itself_about_gradients(refuses_gradients):
    refuses_gradients("pack_scale", pack_scale, dict(scale=ONES, mn=4), "scale")
