"""Dense GEMMs: numbers in all four orders, accumulation, trivial sizes, refusals."""

import pytest
import torch

from moe_ops.csrc_stubs import deep_gemm

OP = "fp8_fp4_gemm_nt"


def quantised(random, mn: int, k: int, gran_mn: int, gran_k: int = 128):
    return random.e4m3(mn, k), random.powers(-(-mn // gran_mn), -(-k // gran_k))


@pytest.mark.parametrize("major", [9, 10, 12])
@pytest.mark.parametrize("m, n, k", [(1, 8, 512), (37, 136, 1024), (5, 16, 1152)], ids=str)
def test_fp8_nt(major, m, n, k, random, reference):
    a, b = quantised(random, m, k, 1), quantised(random, n, k, 128)
    want = reference.product(
        reference.dequantise(*a, 1, 128),
        reference.dequantise(*b, 128, 128),
    )
    with deep_gemm.arch(major):
        d = torch.empty(m, n, dtype=torch.bfloat16)
        deep_gemm.fp8_gemm_nt(a, b, d)
        reference.close(d, want)
        a, b = list(a), (b[0], random.powers(n, k // 128))
        c = torch.randn(m, n)
        d = torch.empty(m, n)
        deep_gemm.fp8_fp4_gemm_nt(a, b, d, c, recipe=(1, 1, 128))
        want = reference.product(
            reference.dequantise(*a, 1, 128),
            reference.dequantise(*b, 1, 128),
        )
        assert torch.allclose(d.double(), want + c.double(), rtol=1e-6, atol=1e-3)
        deep_gemm.fp8_fp4_gemm_nt(a, b, c, c, recipe=(1, 1, 128))
        assert torch.equal(c, d)


def test_fp8_other_orders(random, reference):
    m, n, k = 16, 32, 512
    a, b = quantised(random, m, k, 1), quantised(random, n, k, 1)
    want = reference.product(reference.dequantise(*a, 1, 128), reference.dequantise(*b, 1, 128))
    turned = {False: (a, b), True: tuple((x.mT.contiguous(), s.mT.contiguous()) for x, s in (a, b))}
    for name, turn_a, turn_b in (("nn", False, True), ("tn", True, True), ("tt", True, False)):
        d = torch.empty(m, n, dtype=torch.bfloat16)
        call = getattr(deep_gemm, f"fp8_fp4_gemm_{name}")
        call(turned[turn_a][0], turned[turn_b][1], d, recipe=(1, 1, 128))
        reference.close(d, want)


def test_fp4_operands_of_either_major(random, reference):
    m, n, k = 128, 128, 128
    a, b = random.e2m1(m, k // 2), random.e2m1(n, k // 2)
    sfa, sfb = random.powers(m, 4), random.powers(n, 4)
    want = reference.product(
        reference.dequantise(a, sfa, 1, 32),
        reference.dequantise(b, sfb, 1, 32),
    )
    recipes = {"recipe_a": (1, 32), "recipe_b": (1, 32)}
    for turn in (False, True):
        d = torch.empty(m, n, dtype=torch.bfloat16)
        left = deep_gemm.transpose_packed_fp4(a).mT if turn else a
        right = deep_gemm.transpose_packed_fp4(b).mT if turn else b
        deep_gemm.fp4_gemm_nt((left, sfa), (right, sfb), d, **recipes)
        reference.close(d, want)


@pytest.mark.parametrize("major", [9, 10, 12])
def test_bf16_orders_accumulation_and_dtypes(major, reference):
    a, b, c = torch.randn(5, 40), torch.randn(16, 40), torch.randn(5, 16)
    a, b = a.bfloat16(), b.bfloat16()
    want = reference.product(a.double().numpy(), b.double().numpy())
    with deep_gemm.arch(major):
        for kind in (torch.bfloat16, torch.float32):
            d = torch.empty(5, 16, dtype=kind)
            deep_gemm.bf16_gemm_nt(a, b, d)
            reference.close(d, want)
            deep_gemm.bf16_gemm_nt(a, b, d, c.to(kind))
            reference.close(d, want + c.to(kind).double())
    padded = torch.randn(40, 8).bfloat16()[:, :5]  # a column-major a with a pitch of 16 bytes
    d = torch.empty(5, 16)
    for name, right in (("tt", b), ("tn", b.mT.contiguous())):
        getattr(deep_gemm, f"bf16_gemm_{name}")(padded, right, d)
        reference.close(d, reference.product(padded.mT.double().numpy(), b.double().numpy()))
    deep_gemm.bf16_gemm_nn(a, b.mT.contiguous(), d)
    reference.close(d, want)


def test_alpha_scales_the_product_only(random, reference):
    a, b, c = torch.randn(4, 64).bfloat16(), torch.randn(8, 64).bfloat16(), torch.randn(4, 8)
    d = torch.empty(4, 8)
    deep_gemm.bf16_gemm_nt(a, b, d, c, alpha=0.5)
    want = reference.product(a.double().numpy(), b.double().numpy()) / 2 + c.double()
    reference.close(d, want)
    x, w = quantised(random, 4, 512, 1), quantised(random, 8, 512, 128)
    whole, half = torch.empty(4, 8), torch.empty(4, 8)
    deep_gemm.fp8_gemm_nt(x, w, whole)
    deep_gemm.fp8_gemm_nt(x, w, half, alpha=0.5)
    assert torch.equal(half, whole / 2)


def test_trivial_sizes():
    empty = torch.empty(0, 64, dtype=torch.bfloat16)
    deep_gemm.bf16_gemm_nt(empty, torch.ones(8, 64).bfloat16(), torch.empty(0, 8))
    d, c = torch.full((4, 8), 7.0), torch.randn(4, 8)
    nothing = torch.empty(4, 0, dtype=torch.bfloat16), torch.empty(8, 0, dtype=torch.bfloat16)
    deep_gemm.bf16_gemm_nt(*nothing, d)
    assert (d == 0).all()
    deep_gemm.bf16_gemm_nt(*nothing, d, c)
    assert torch.equal(d, c)
    deep_gemm.bf16_gemm_nt(*nothing, c, c)
    assert torch.equal(d, c)


def test_c_explains_itself(refuses):
    a, b, d = torch.ones(4, 64).bfloat16(), torch.ones(8, 64).bfloat16(), torch.empty(4, 8)
    with refuses(
        "bf16_gemm_nt: c must be float32; got bfloat16. Convert it to d's dtype.",
        kind=TypeError,
    ):
        deep_gemm.bf16_gemm_nt(a, b, d, d.bfloat16())
    with refuses(
        "bf16_gemm_nt: c must be row-major, without gaps between groups;",
        "got strides (1, 4) for shape (4, 8). Pass a contiguous tensor.",
    ):
        deep_gemm.bf16_gemm_nt(a, b, d, torch.empty(8, 4).mT)
    with refuses(
        "bf16_gemm_nt: c must be of d's shape and strides when it shares d's memory;",
        "got shape (1, 8), strides (8, 1). Pass d itself, or a copy.",
    ):
        deep_gemm.bf16_gemm_nt(a, b, d, d[:1])


@pytest.mark.parametrize("major", [9, 12])
def test_alpha_explains_itself(major, random, refuses):
    x, w = quantised(random, 4, 512, 1), quantised(random, 8, 512, 128)
    with (
        deep_gemm.arch(major),
        refuses(
            f"{OP}: alpha must be None except on sm100; got 0.5 on sm{major}0.",
            "Multiply the result, or fold it into a scale.",
            kind=NotImplementedError,
        ),
    ):
        deep_gemm.fp8_gemm_nt(x, w, torch.empty(4, 8), alpha=0.5)


def test_sm90_result_explains_itself(random, refuses):
    x, w = quantised(random, 4, 512, 1), quantised(random, 8, 512, 128)
    rows = w[0], random.powers(8, 4)
    fix = "fp32 accumulation takes recipe (1, 1, 128), a bf16 result (1, 128, 128)."
    with deep_gemm.arch(9):
        with refuses(
            f"{OP}: c and d must be without c and bfloat16 d on sm90 for 128x128 scales of b;",
            f"got no c and float32 d. {fix}",
        ):
            deep_gemm.fp8_gemm_nt(x, w, torch.empty(4, 8))
        with refuses(
            f"{OP}: c and d must be with c and float32 d on sm90 for 1x128 scales of b;",
            f"got no c and float32 d. {fix}",
        ):
            deep_gemm.fp8_gemm_nt(x, rows, torch.empty(4, 8), recipe=(1, 1, 128))
        with refuses(f"{OP}: n must be a multiple of 8 on sm90; got 9. Pad b with zero rows."):
            w = quantised(random, 9, 512, 128)
            deep_gemm.fp8_gemm_nt(x, w, torch.empty(4, 9, dtype=torch.bfloat16))
        with refuses(
            f"{OP}: b must be K-major, last stride 1; got strides (1, 8).",
            "Pass (.., mn, k) contiguous, not a transposed view.",
        ):
            turned = random.e4m3(512, 8).mT
            deep_gemm.fp8_gemm_nt(x, (turned, w[1]), torch.empty(4, 8, dtype=torch.bfloat16))


def test_orders_explain_themselves(random, refuses):
    x = quantised(random, 4, 512, 1)
    with refuses("fp8_fp4_gemm_nn: b must be a matrix, 2-D; got shape (2, 2, 2). Reshape it."):
        deep_gemm.fp8_fp4_gemm_nn(x, (torch.ones(2, 2, 2), x[1]), x[0])
    with refuses("fp8_fp4_gemm_tt: a's scale must be a matrix, 2-D; got shape (4). Reshape it."):
        deep_gemm.fp8_fp4_gemm_tt((x[0], x[1][0]), x, x[0])
