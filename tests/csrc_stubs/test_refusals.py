"""Checks of shapes, strides, dtypes and group layouts, each tripped once by one change."""

import pytest
import torch

from moe_ops.csrc_stubs import deep_gemm

CONTIGUOUS = "m_grouped_fp8_fp4_gemm_nt_contiguous"
MASKED = "m_grouped_fp8_fp4_gemm_nt_masked"
BF16 = "m_grouped_bf16_gemm_nt_contiguous"
BF16_MASKED = "m_grouped_bf16_gemm_nt_masked"
FIX_SIZES = "Allocate it from the shapes of a and b."
E, M, N, K = 2, 16, 24, 512  # of the calls in conftest.py


@pytest.mark.parametrize("major", [9, 10, 12])
def test_the_calls_pass_unchanged(calls, major):
    with deep_gemm.arch(major):
        calls.contiguous()
        calls.masked()
        calls.bf16()


def test_pairs(calls, refuses):
    with refuses(
        f"{CONTIGUOUS}: a must be a pair (values, scale); got Tensor.",
        "bf16 values without scales go to the bf16 functions.",
        kind=TypeError,
    ):
        calls.contiguous(a=calls.e4m3(M, K))


def test_devices(calls, refuses):
    with refuses(
        f"{CONTIGUOUS}: a's scale must be on cpu like a; got meta. Move it with .to('cpu').",
        kind=TypeError,
    ):
        calls.contiguous(a=(calls.e4m3(M, K), torch.ones(M, 4, device="meta")))


def test_dimensions_and_strides(calls, refuses):
    with refuses(f"{CONTIGUOUS}: a must be (m, k), 2-D; got shape (1, 16, 512). Reshape it."):
        calls.contiguous(a=(calls.e4m3(1, M, K), torch.ones(M, 4)))
    with refuses(
        f"{CONTIGUOUS}: b must be (num_groups, n, k), 3-D; got shape (24, 512). Reshape it.",
    ):
        calls.contiguous(b=(calls.e4m3(N, K), torch.ones(1, 4)))
    with refuses(
        f"{CONTIGUOUS}: b must be without gaps between groups, stride(0) = 12288; got 24576.",
        "Call .contiguous().",
    ):
        calls.contiguous(b=(calls.e4m3(2 * E, N, K)[::2], torch.ones(E, 1, 4)))
    with refuses(
        f"{CONTIGUOUS}: a must be contiguous along one of its last two dimensions;",
        "got strides (1024, 2). Call .contiguous().",
    ):
        calls.contiguous(a=(calls.e4m3(M, 2 * K)[:, ::2], torch.ones(M, 4)))
    with refuses(
        f"{CONTIGUOUS}: a must be K-major, last stride 1; got strides (1, 16).",
        "Pass (.., mn, k) contiguous, not a transposed view.",
    ):
        calls.contiguous(a=(calls.e4m3(K, M).mT, torch.ones(M, 4)))
    turned = calls.e4m3(E, K, 32).mT
    d = torch.empty(M, 32, dtype=torch.bfloat16)
    calls.contiguous(b=(turned, torch.ones(E, 1, 4)), d=d)
    with (
        deep_gemm.arch(9),
        refuses(
            f"{CONTIGUOUS}: b must be K-major, last stride 1; got strides (16384, 1, 32).",
            "Pass (.., mn, k) contiguous, not a transposed view.",
        ),
    ):
        calls.contiguous(b=(turned, torch.ones(E, 1, 4)))
    with refuses(
        f"{MASKED}: b must be K-major, last stride 1; got strides (16384, 1, 32).",
        "Pass (.., mn, k) contiguous, not a transposed view.",
    ):
        calls.masked(b=(turned, torch.ones(E, 1, 4)))


def test_dtypes_of_operands(calls, refuses):
    with refuses(
        f"{CONTIGUOUS}: b must be float8_e4m3fn or int8; got uint8.",
        "Packed e2m1 is int8: view it with .view(torch.int8).",
        kind=TypeError,
    ):
        calls.contiguous(b=(calls.e4m3(E, N, K // 2).view(torch.uint8), torch.ones(E, N, 16)))
    with (
        deep_gemm.arch(9),
        refuses(
            f"{CONTIGUOUS}: b must be float8_e4m3fn on sm90; got int8.",
            "Convert the weights to e4m3, or set DG_STUB_ARCH=10.",
            kind=NotImplementedError,
        ),
    ):
        calls.contiguous(b=(calls.e4m3(E, N, K // 2).view(torch.int8), torch.ones(E, N, 16)))
    with refuses(
        f"{BF16}: a must be bfloat16; got float16. Quantised values go to the fp8 functions.",
        kind=TypeError,
    ):
        calls.bf16(a=torch.ones(M, K).half())


def test_sizes(calls, refuses):
    with refuses(
        f"{CONTIGUOUS}: b must be of a's k = 512; got k = 256.",
        "Packed e2m1 counts two to a byte.",
    ):
        calls.contiguous(b=(calls.e4m3(E, N, 256), torch.ones(E, 1, 2)))
    with refuses(f"{CONTIGUOUS}: b must be non-empty; got 0 groups, n=24, k=512. Skip the call."):
        calls.contiguous(b=(calls.e4m3(0, N, K), torch.ones(0, 1, 4)))
    with refuses(
        f"{MASKED}: b must be of a's 2 groups; got 3 groups.",
        "Both have one matrix a local expert.",
    ):
        calls.masked(b=(calls.e4m3(3, N, K), torch.ones(3, 1, 4)))
    with refuses(
        f"{MASKED}: sizes must be all positive; got groups=2, m=0, n=24, k=512.",
        "Skip the call: no empty slab has a kernel.",
    ):
        calls.masked(a=(calls.e4m3(E, 0, K), torch.ones(E, 0, 4)))
    with refuses(
        f"{MASKED}: expected_m must be positive; got 0.",
        "It is a hint for tile sizes: clamp it to at least 1.",
    ):
        calls.masked(expected_m=0)


def test_output(calls, refuses):
    with refuses(f"{CONTIGUOUS}: d must be (m, n), 2-D; got shape (384). Reshape it."):
        calls.contiguous(d=torch.empty(M * N, dtype=torch.bfloat16))
    with refuses(f"{CONTIGUOUS}: d must be of shape (m, n) = (16, 24); got (16, 32). {FIX_SIZES}"):
        calls.contiguous(d=torch.empty(M, 32, dtype=torch.bfloat16))
    with refuses(
        f"{CONTIGUOUS}: d must be bfloat16; got float32. Allocate it in that dtype.",
        kind=TypeError,
    ):
        calls.contiguous(d=torch.empty(M, N))
    with refuses(
        f"{CONTIGUOUS}: d must be row-major, without gaps between groups;",
        "got strides (1, 16) for shape (16, 24). Pass a contiguous tensor.",
    ):
        calls.contiguous(d=torch.empty(N, M, dtype=torch.bfloat16).mT)
    with refuses(
        f"{MASKED}: d must be row-major, without gaps between groups;",
        "got strides (768, 24, 1) for shape (2, 16, 24). Pass a contiguous tensor.",
    ):
        calls.masked(d=torch.empty(2 * E, M, N, dtype=torch.bfloat16)[::2])


def test_group_layouts(calls, refuses):
    name = f"{CONTIGUOUS}: grouped_layout"
    with refuses(f"{name} must be int32; got int64. Convert it with .int().", kind=TypeError):
        calls.contiguous(grouped_layout=torch.zeros(M, dtype=torch.int64))
    with refuses(f"{name} must be of shape (m,) = (16,); got (2). Give one entry each."):
        calls.contiguous(grouped_layout=torch.zeros(E, dtype=torch.int32))
    with refuses(f"{name} must be of shape (num_groups,) = (2,); got (16). Give one entry each."):
        calls.contiguous(grouped_layout=torch.zeros(M, dtype=torch.int32), use_psum_layout=True)
    with refuses(f"{name} must be contiguous; got strides (2). Call .contiguous()."):
        calls.contiguous(grouped_layout=torch.zeros(2 * M, dtype=torch.int32)[::2])
    with refuses(
        f"{MASKED}: masked_m must be of shape (num_groups,) = (2,); got (3). Give one entry each.",
    ):
        calls.masked(masked_m=torch.zeros(3, dtype=torch.int32))
    with refuses(
        f"{CONTIGUOUS}: expected_m_for_psum_layout must be None without use_psum_layout; got 4.",
        "Drop it.",
    ):
        calls.contiguous(expected_m_for_psum_layout=4)


def test_group_ids_counts_and_ends_write_nothing(calls, refuses):
    d = torch.full((M, N), 7.0).bfloat16()
    deep_gemm.set_mk_alignment_for_contiguous_layout(16)
    with refuses(
        f"{CONTIGUOUS}: grouped_layout[0] must be a group below 2, or negative; got 2.",
        "Mark rows without one by -1.",
    ):
        calls.contiguous(d=d, grouped_layout=torch.full((M,), 2, dtype=torch.int32))
    ends = "between the aligned end of the group before and m"
    fix = "An empty group ends where it starts, at a multiple of 16."
    for psum, index, start in (([3, 3], 1, 16), ([-1, 0], 0, 0), ([16, 17], 1, 16)):
        with refuses(
            f"{CONTIGUOUS}: grouped_layout[{index}] must be in {start}..16: {ends};",
            f"got {psum[index]}. {fix}",
        ):
            layout = torch.tensor(psum, dtype=torch.int32)
            calls.contiguous(d=d, grouped_layout=layout, use_psum_layout=True)
    assert (d == 7).all()
    d = torch.full((E, M, N), 7.0).bfloat16()
    for count in (M + 1, -1):
        with refuses(
            f"{MASKED}: masked_m[1] must be in 0..16, the rows of a slab; got {count}.",
            "Cap it, or widen the slabs.",
        ):
            calls.masked(d=d, masked_m=torch.tensor([3, count], dtype=torch.int32))
    assert (d == 7).all()


def test_names_of_the_other_forms_are_used(calls, refuses):
    with refuses(
        f"{BF16_MASKED}: expected_m must be positive; got 0.",
        "It is a hint for tile sizes: clamp it to at least 1.",
    ):
        deep_gemm.m_grouped_bf16_gemm_nt_masked(
            torch.ones(E, M, K).bfloat16(),
            torch.ones(E, N, K).bfloat16(),
            torch.empty(E, M, N, dtype=torch.bfloat16),
            torch.zeros(E, dtype=torch.int32),
            0,
        )
    op = "m_grouped_fp8_fp4_gemm_nn_contiguous"
    with refuses(
        f"{op}: b's scale must be (num_groups, k groups, n groups), 3-D; got shape (4).",
        "Reshape it.",
    ):
        deep_gemm.m_grouped_fp8_gemm_nn_contiguous(
            (calls.e4m3(M, K), torch.ones(M, 4)),
            (calls.e4m3(E, K, N), torch.ones(4)),
            torch.empty(M, N, dtype=torch.bfloat16),
            torch.zeros(M, dtype=torch.int32),
        )
    with refuses(
        "m_grouped_bf16_gemm_nn_contiguous: b must be (num_groups, k, n), 3-D; got shape (512).",
        "Reshape it.",
    ):
        deep_gemm.m_grouped_bf16_gemm_nn_contiguous(
            torch.ones(M, K).bfloat16(),
            torch.ones(K).bfloat16(),
            torch.empty(M, N, dtype=torch.bfloat16),
            torch.zeros(M, dtype=torch.int32),
        )
