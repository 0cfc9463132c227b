"""Numbers of the grouped GEMMs, element by element; and the rows that must not be touched."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moe_ops.csrc_stubs import deep_gemm

MARK = -1234.0
EXAMPLES = settings(
    max_examples=25,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)
# arch, gran_k of a and b, e2m1 (a, b), scales packed beforehand. K = 512: packed width 1.
CASES = {
    "sm90": (9, 128, 128, (False, False), False),
    "sm100-fp32": (10, 128, 128, (False, False), False),
    "sm100-packed": (10, 128, 128, (False, False), True),
    "sm100-mxfp8": (10, 32, 32, (False, False), True),
    "sm100-mxfp4": (10, 128, 32, (False, True), True),
    "sm100-fp4xfp4": (10, 32, 32, (True, True), True),
    "sm120-fp32": (12, 128, 128, (False, False), False),
    "sm120-mxfp4": (12, 128, 32, (False, True), False),
}
blocks_and_k = pytest.mark.parametrize("k", [512, 1024, 1152])
case = pytest.mark.parametrize("name", CASES)
EXPERTS, N = 3, 40


class Problem:
    """Random operands of one case, the arguments of the call, and float64 rows of both."""

    def __init__(self, name, rows: tuple, k: int, random, reference):
        self.major, self.gran_a, self.gran_b, fp4, packed = CASES[name]
        blocks = self.gran_b == 128 and not packed  # 128x128 scales of b
        a = self._values(fp4[0], random, *rows, k)
        b = self._values(fp4[1], random, EXPERTS, N, k)
        sfa = random.powers(*rows, -(-k // self.gran_a))
        sfb = random.powers(EXPERTS, -(-N // 128) if blocks else N, -(-k // self.gran_b))
        self.recipes = {}
        if self.gran_a == self.gran_b and not blocks:
            self.recipes = {"recipe": (1, 1, self.gran_a)}
        elif not blocks:
            self.recipes = {"recipe_a": (1, self.gran_a), "recipe_b": (1, self.gran_b)}
        gran_mn = 128 if blocks else 1
        slabs = [(a, sfa)] if len(rows) == 1 else list(zip(a, sfa, strict=True))
        self.a_rows = [reference.dequantise(x, s, 1, self.gran_a) for x, s in slabs]
        experts = zip(b, sfb, strict=True)
        self.b_rows = [reference.dequantise(x, s, gran_mn, self.gran_b) for x, s in experts]
        if packed:
            pack = deep_gemm.get_mn_major_tma_aligned_packed_ue8m0_tensor
            sfa, sfb = pack(sfa), pack(sfb)
        self.a, self.b = (a, sfa), (b, sfb)
        self.d = torch.full((*rows, N), MARK, dtype=torch.bfloat16)

    @staticmethod
    def _values(fp4, random, *shape):
        return random.e2m1(*shape[:-1], shape[-1] // 2) if fp4 else random.e4m3(*shape)


@case
@blocks_and_k
def test_contiguous(name, k, random, reference):
    """Blocks follow their first row: -1 inside is computed, a block starting with -1 is not."""
    problem = Problem(name, (70,), k, random, reference)  # three blocks, the last one cut
    layout = torch.tensor([2] * 20 + [-1] * 12 + [-1] * 32 + [0] * 6, dtype=torch.int32)
    owner = [2] * 32 + [-1] * 32 + [0] * 6
    deep_gemm.set_mk_alignment_for_contiguous_layout(64 if problem.major == 9 else 32)
    if problem.major == 9:
        layout = torch.tensor([-1] * 64 + [2] * 3 + [-1] * 3, dtype=torch.int32)
        owner = [-1] * 64 + [2] * 6
    if problem.major == 12:
        deep_gemm.set_mk_alignment_for_contiguous_layout(64)
        layout = torch.tensor([1] * 50 + [-1] * 14 + [-1] * 3 + [0] * 3, dtype=torch.int32)
        owner = [1] * 64 + [-1] * 6
    with deep_gemm.arch(problem.major):
        call = deep_gemm.m_grouped_fp8_fp4_gemm_nt_contiguous
        assert call(problem.a, problem.b, problem.d, layout, **problem.recipes) is None
    for row, expert in enumerate(owner):
        got = problem.d[row]
        if expert < 0:
            assert (got == MARK).all(), row
        else:
            a_row = problem.a_rows[0][row : row + 1]
            reference.close(got[None], reference.product(a_row, problem.b_rows[expert]))


@case
@blocks_and_k
def test_masked(name, k, random, reference):
    problem = Problem(name, (EXPERTS, 7), k, random, reference)
    masked_m = torch.tensor([7, 0, 3], dtype=torch.int32)
    with deep_gemm.arch(problem.major):
        call = deep_gemm.m_grouped_fp8_fp4_gemm_nt_masked
        call(problem.a, problem.b, problem.d, masked_m, 4, **problem.recipes)
    for expert, count in enumerate(masked_m.tolist()):
        want = reference.product(problem.a_rows[expert][:count], problem.b_rows[expert])
        reference.close(problem.d[expert, :count], want)
        assert (problem.d[expert, count:] == MARK).all()


@pytest.mark.parametrize("whole_blocks", [True, False])
@pytest.mark.parametrize("name", ["sm90", "sm100-fp32", "sm100-mxfp8"])
def test_psum(name, whole_blocks, random, reference):
    """Ends need not be aligned; expert 1 is empty; padding is computed or left, never another's."""
    problem = Problem(name, (200,), 512, random, reference)
    ends = [5, 64, 70]
    deep_gemm.set_mk_alignment_for_contiguous_layout(64)
    if name == "sm100-fp32":  # rows between groups are not even inspected
        problem.a[1][5:64] = float("nan")
    with deep_gemm.arch(problem.major):
        deep_gemm.m_grouped_fp8_fp4_gemm_nt_contiguous(
            problem.a,
            problem.b,
            problem.d,
            torch.tensor(ends, dtype=torch.int32),
            **problem.recipes,
            use_psum_layout=True,
            ensure_zero_padding=whole_blocks,
            expected_m_for_psum_layout=64,
        )
    parts = {0: (0, 5, 64), 2: (64, 70, 128)}
    for expert, (start, end, aligned) in parts.items():
        last = aligned if whole_blocks and name != "sm100-fp32" else end
        want = reference.product(problem.a_rows[0][start:last], problem.b_rows[expert])
        reference.close(problem.d[start:last], want)
        if not whole_blocks:
            assert (problem.d[end:aligned] == MARK).all()
    assert (problem.d[128:] == MARK).all()


def test_psum_zero_rows_give_zero_rows(random, reference):
    problem = Problem("sm100-mxfp8", (128,), 512, random, reference)
    problem.a[0].view(torch.uint8)[5:] = 0
    ends = torch.tensor([5, 128, 128], dtype=torch.int32)
    deep_gemm.m_grouped_fp8_fp4_gemm_nt_contiguous(
        problem.a,
        problem.b,
        problem.d,
        ends,
        **problem.recipes,
        use_psum_layout=True,
    )
    assert (problem.d[5:] == 0).all() and (problem.d[:5] != MARK).all()


@pytest.mark.parametrize("major", [9, 10, 12])
def test_bf16(major, reference):
    a, b = torch.randn(130, 192).bfloat16(), torch.randn(EXPERTS, 24, 192).bfloat16()
    layout = torch.tensor([1] * 128 + [2] * 2, dtype=torch.int32)
    wanted = [
        reference.product(a[:128].double().numpy(), b[1].double().numpy()),
        reference.product(a[128:].double().numpy(), b[2].double().numpy()),
    ]
    with deep_gemm.arch(major):
        for name, weights in (("nt", b), ("nn", b.mT.contiguous())):
            d = torch.full((130, 24), MARK, dtype=torch.bfloat16)
            call = getattr(deep_gemm, f"m_grouped_bf16_gemm_{name}_contiguous")
            call(a, weights, d, layout)
            reference.close(d, torch.cat(wanted))
        slabs = a[:126].view(EXPERTS, 42, 192)
        d = torch.full((EXPERTS, 42, 24), MARK, dtype=torch.bfloat16)
        counts = torch.tensor([0, 42, 1], dtype=torch.int32)
        deep_gemm.m_grouped_bf16_gemm_nt_masked(slabs, b, d, counts, 1)
        for expert, count in enumerate(counts.tolist()):
            rows = slabs[expert, :count].double().numpy()
            want = reference.product(rows, b[expert].double().numpy())
            reference.close(d[expert, :count], want)
            assert (d[expert, count:] == MARK).all()


@pytest.mark.parametrize("fp4", [False, True])
def test_nn_takes_weights_and_scales_transposed(fp4, random, reference):
    k, n = 512, 128
    weights = random.e2m1(EXPERTS, n, k // 2) if fp4 else random.e4m3(EXPERTS, n, k)
    gran_k = 32 if fp4 else 128
    sfb = random.powers(EXPERTS, n if fp4 else 1, k // gran_k)
    a, sfa = random.e4m3(64, k), random.powers(64, 4)
    if fp4:  # pairs lie along n when n is the contiguous dimension
        turned = torch.stack([deep_gemm.transpose_packed_fp4(w) for w in weights])
    else:
        turned = weights.mT.contiguous()
    recipes = {"recipe_a": (1, 128), "recipe_b": (1, 32)} if fp4 else {}
    d = torch.empty(64, n, dtype=torch.bfloat16)
    layout = torch.full((64,), 2, dtype=torch.int32)
    scales = sfb.mT.contiguous()
    deep_gemm.m_grouped_fp8_fp4_gemm_nn_contiguous((a, sfa), (turned, scales), d, layout, **recipes)
    want = reference.product(
        reference.dequantise(a, sfa, 1, 128),
        reference.dequantise(weights[2], sfb[2], 1 if fp4 else 128, gran_k),
    )
    reference.close(d, want)


def test_n_need_not_be_a_multiple_of_anything_on_sm120(random, reference):
    a, b = random.e4m3(3, 512), random.e4m3(2, 35, 512)
    sfa, sfb = random.powers(3, 4), random.powers(2, 1, 4)
    d = torch.empty(3, 35, dtype=torch.bfloat16)
    with deep_gemm.arch(12):
        layout = torch.ones(3, dtype=torch.int32)
        deep_gemm.m_grouped_fp8_gemm_nt_contiguous((a, sfa), (b, sfb), d, layout)
    want = reference.product(
        reference.dequantise(a, sfa, 1, 128),
        reference.dequantise(b[1], sfb[1], 128, 128),
    )
    reference.close(d, want)


def test_scale_bytes_0_and_255(random):
    """Byte 0 is 2^-127, not zero; byte 255 is NaN, not infinity."""
    a = torch.ones(2, 512).to(torch.float8_e4m3fn)
    words = torch.zeros(1, 4, dtype=torch.int32)[:, :2].mT
    words[1] = -1
    ones = torch.full((1, 8), 0x7F7F7F7F, dtype=torch.int32).mT[None]
    b = torch.ones(1, 8, 512).to(torch.float8_e4m3fn)
    d = torch.empty(2, 8, dtype=torch.bfloat16)
    layout = torch.zeros(2, dtype=torch.int32)
    deep_gemm.m_grouped_fp8_gemm_nt_contiguous((a, words), (b, ones), d, layout)
    assert (d[0] == 512 * 2.0**-127).all() and d[1].isnan().all()


@pytest.mark.parametrize("major", [9, 10, 12])
def test_no_rows_writes_nothing(major, random):
    d = torch.empty(0, N, dtype=torch.bfloat16)
    none = torch.empty(0, dtype=torch.int32)
    with deep_gemm.arch(major):
        a, sfa = random.e4m3(0, 512), torch.empty(0, 4)
        b, sfb = random.e4m3(2, N, 512), random.powers(2, 1, 4)
        deep_gemm.m_grouped_fp8_gemm_nt_contiguous((a, sfa), (b, sfb), d, none)
        deep_gemm.m_grouped_bf16_gemm_nt_contiguous(a.bfloat16(), b.bfloat16(), d, none)


def test_no_expert_with_rows_writes_nothing(random, reference):
    problem = Problem("sm100-packed", (70,), 512, random, reference)
    layout = torch.full((70,), -1, dtype=torch.int32)
    deep_gemm.m_grouped_fp8_gemm_nt_contiguous(
        problem.a,
        problem.b,
        problem.d,
        layout,
        **problem.recipes,
    )
    assert (problem.d == MARK).all()


def test_scale_kinds_may_differ_on_blackwell(random, reference):
    """Packed a with fp32 blocks of b, and the reverse: the library packs what is not packed."""
    pack = deep_gemm.get_mn_major_tma_aligned_packed_ue8m0_tensor
    a, b = random.e4m3(5, 512), random.e4m3(1, 8, 512)
    sfa, blocks, rows = random.powers(5, 4), random.powers(1, 1, 4), random.powers(1, 8, 4)
    layout = torch.zeros(5, dtype=torch.int32)
    a_rows = reference.dequantise(a, sfa, 1, 128)
    pairs = ((pack(sfa), blocks, blocks, 128), (sfa, pack(rows), rows, 1))
    for scale_a, scale_b, plain, gran in pairs:
        d = torch.empty(5, 8, dtype=torch.bfloat16)
        deep_gemm.m_grouped_fp8_gemm_nt_contiguous((a, scale_a), (b, scale_b), d, layout)
        b_rows = reference.dequantise(b[0], plain[0], gran, 128)
        reference.close(d, reference.product(a_rows, b_rows))


@EXAMPLES
@given(
    owners=st.lists(st.integers(-1, EXPERTS - 1), min_size=1, max_size=5),
    inside=st.integers(0, 31),
    cut=st.integers(0, 31),
)
def test_any_layout(owners, inside, cut):
    """Every block is its first row's expert times its rows, whatever the other entries say."""
    deep_gemm.set_mk_alignment_for_contiguous_layout(32)
    m = 32 * len(owners) - cut
    layout = torch.tensor(owners, dtype=torch.int32).repeat_interleave(32)
    layout[inside::32] = layout[inside::32] if inside == 0 else -1
    a = torch.arange(m).remainder(7).float().bfloat16()[:, None].repeat(1, 64)
    b = torch.arange(1, EXPERTS + 1).bfloat16()[:, None, None].repeat(1, 8, 64)
    d = torch.full((m, 8), MARK, dtype=torch.bfloat16)
    deep_gemm.m_grouped_bf16_gemm_nt_contiguous(a, b, d, layout[:m].contiguous())
    for row in range(m):
        owner = owners[row // 32]
        want = MARK if owner < 0 else 64.0 * (row % 7) * (owner + 1)
        assert (d[row] == torch.tensor(want).bfloat16()).all(), row
