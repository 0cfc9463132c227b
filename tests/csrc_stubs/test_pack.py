"""Layouts of scales: MN-major fp32, packed UE8M0, and the round trip through both."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moe_ops.csrc_stubs import deep_gemm

PACK = "get_mn_major_tma_aligned_packed_ue8m0_tensor"
SHAPES = [
    (1, 1),
    (4, 4),
    (5, 3),
    (7, 33),
    (510, 30),
    (2, 5, 9),
    (3, 4, 1),
    (3, 1, 4),
    (0, 4),
    (2, 0, 5),
]
EXAMPLES = settings(
    max_examples=60,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)


def strides(mn: int, width: int, dims: int) -> tuple:
    padded = (mn + 3) // 4 * 4
    return (1, padded) if dims == 2 else (padded * width, 1, padded)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_pack_places_every_byte(shape, random):
    sf = random.powers(*shape)
    packed = getattr(deep_gemm, PACK)(sf)
    *groups, mn, width = shape
    words = -(-width // 4)
    assert packed.dtype == torch.int32
    assert packed.shape == (*groups, mn, words)
    if packed.numel():
        assert packed.stride() == strides(mn, words, len(shape))
    count = groups[0] if groups else 1
    matrices = zip(sf.view(count, mn, width), packed.reshape(count, mn, words), strict=True)
    for matrix, bytes_ in matrices:
        for i in range(mn):
            for j in range(4 * words):
                byte = int(bytes_[i, j // 4]) >> 8 * (j % 4) & 255
                want = 0.0 if j >= width else float(matrix[i, j])
                assert byte == 0 if want == 0 else 2.0 ** (byte - 127) == want, (i, j)


@EXAMPLES
@given(
    exponents=st.lists(st.integers(0, 255), min_size=1, max_size=40),
    rows=st.integers(1, 9),
)
def test_pack_any_exponent(exponents, rows):
    """Every byte survives, 0 (fp32 zero) and 255 (fp32 infinity) included."""
    bits = torch.tensor(exponents, dtype=torch.int32).expand(rows, -1) << 23
    packed = getattr(deep_gemm, PACK)(bits.view(torch.float32))
    words = torch.tensor([int(w) & 0xFFFFFFFF for w in packed[-1]])
    got = [int(words[j // 4]) >> 8 * (j % 4) & 255 for j in range(len(exponents))]
    assert got == exponents


def test_pack_accepts_mn_major_input(random):
    sf = random.powers(6, 8).mT.contiguous().mT  # strides (1, 6): 6 % 4 != 0 takes any strides
    assert torch.equal(getattr(deep_gemm, PACK)(sf), getattr(deep_gemm, PACK)(sf.contiguous()))
    sf = random.powers(6, 8).mT  # (8, 6), strides (1, 8)
    assert torch.equal(getattr(deep_gemm, PACK)(sf), getattr(deep_gemm, PACK)(sf.contiguous()))


def test_pack_skips_rows_between_groups(random):
    deep_gemm.set_mk_alignment_for_contiguous_layout(8)
    sf = random.powers(32, 4)
    inside = [*range(0, 3), *range(8, 17)]  # groups end at 3, 8 (empty), 17
    outside = [row for row in range(32) if row not in inside]
    sf[outside] = float("nan")
    packed = getattr(deep_gemm, PACK)(sf, torch.tensor([3, 8, 17], dtype=torch.int32))
    assert (packed[outside] == 0).all()
    assert torch.equal(packed[inside], getattr(deep_gemm, PACK)(sf[inside]))


@pytest.mark.parametrize("bad", [1.99, 1.5, 3.0, -1.0, float("nan"), 1e-45], ids=str)
@pytest.mark.parametrize("shape, index", [((3, 8), (1, 6)), ((2, 3, 5), (1, 2, 4))], ids=str)
def test_pack_names_the_first_bad_scale(shape, index, bad, random, refuses):
    sf = random.powers(*shape)
    sf[index] = bad
    with refuses(
        f"{PACK}: sf[{', '.join(map(str, index))}] must be a positive power of two; got",
        f"{sf[index].item()!r}. Round scales up with ceil_to_ue8m0 before quantising with them;",
        "rounding only the scale changes every value of its group.",
    ):
        getattr(deep_gemm, PACK)(sf)


def test_pack_of_four_equal_bad_scales(refuses):
    """Mantissa bits of one byte must never reach the next."""
    with refuses(
        f"{PACK}: sf[0, 0] must be a positive power of two; got 1.5. Round scales up with",
        "ceil_to_ue8m0 before quantising with them; rounding only the scale changes every value",
        "of its group.",
    ):
        getattr(deep_gemm, PACK)(torch.full((1, 4), 1.5))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_mn_major(shape):
    sf = torch.randn(shape)
    out = deep_gemm.get_mn_major_tma_aligned_tensor(sf)
    assert torch.equal(out, sf)
    if out.numel():
        assert out.stride() == strides(shape[-2], shape[-1], len(shape))
        assert deep_gemm.get_mn_major_tma_aligned_tensor(out) is out
    strided = torch.randn(*shape[:-1], 2 * shape[-1])[..., ::2]
    assert torch.equal(deep_gemm.get_mn_major_tma_aligned_tensor(strided), strided)


@pytest.mark.parametrize(
    "sizes, aligned",
    [((5, 4), 8), ((4, 4), 4), ((0, 4), 0), ((17, 1), 32), ((9, 2), 16), ((3, 16), 3)],
    ids=str,
)
def test_tma_aligned_size(sizes, aligned):
    assert deep_gemm.get_tma_aligned_size(*sizes) == aligned


def test_layout_functions_explain_themselves(random, refuses):
    pack, sf = getattr(deep_gemm, PACK), random.powers(8, 4)
    with refuses(
        "get_tma_aligned_size: element_size must be a divisor of 16; got 3.",
        "Give the size of a scale, 4.",
    ):
        deep_gemm.get_tma_aligned_size(8, 3)
    with refuses(
        f"{PACK}: sf must be ([groups,] mn, k groups), 2-D or 3-D; got shape (4).",
        "Give one matrix, or one a group.",
    ):
        pack(sf[0])
    with refuses(
        "get_mn_major_tma_aligned_tensor: sf must be float32; got bfloat16.",
        "Integer scales are packed already; convert others with .float().",
        kind=TypeError,
    ):
        deep_gemm.get_mn_major_tma_aligned_tensor(sf.bfloat16())
    with refuses(
        f"{PACK}: sf must be contiguous, or MN-major with strides (1, 8); got strides (8, 1).",
        "Call .contiguous().",
    ):
        pack(random.powers(8, 8)[:, :4])


def test_psum_layout_explains_itself(random, refuses):
    pack, sf = getattr(deep_gemm, PACK), random.powers(8, 4)
    ends = torch.tensor([3, 8], dtype=torch.int32)
    with refuses(
        f"{PACK}: sf must be 2-D and contiguous when psum_layout is given; got shape (2, 8, 4),",
        "strides (32, 4, 1). Call .contiguous().",
    ):
        pack(random.powers(2, 8, 4), ends)
    with refuses(
        f"{PACK}: psum_layout must be int32; got int64. Convert it with .int().",
        kind=TypeError,
    ):
        pack(sf, ends.long())
    with refuses(
        f"{PACK}: psum_layout must be contiguous, with a group; got shape (0), strides (1).",
        "Call .contiguous().",
    ):
        pack(sf, ends[:0])
