"""Checks of recipes, scales, block sizes and addresses, each tripped once by one change."""

import pytest
import torch

from moe_ops.csrc_stubs import deep_gemm

CONTIGUOUS = "m_grouped_fp8_fp4_gemm_nt_contiguous"
MASKED = "m_grouped_fp8_fp4_gemm_nt_masked"
BF16 = "m_grouped_bf16_gemm_nt_contiguous"
E, M, N, K = 2, 16, 24, 512  # of the calls in conftest.py


def test_recipes(calls, refuses):
    with deep_gemm.arch(9):
        words = torch.ones(1, M, dtype=torch.int32).mT
        with refuses(
            f"{CONTIGUOUS}: scales must be float32 for a and b on sm90;",
            "got int32 for a, float32 for b. Unpacked scales go in on sm90.",
            kind=TypeError,
        ):
            calls.contiguous(a=(calls.e4m3(M, K), words))
        with refuses(
            f"{CONTIGUOUS}: recipe must be (1, 128) for a and (128, 128) for b on sm90;",
            "got (1, 128) and (1, 128). Quantise weights in 128x128 blocks.",
        ):
            calls.contiguous(b=(calls.e4m3(E, N, K), torch.ones(E, N, 4)), recipe=(1, 1, 128))
    with refuses(
        f"{CONTIGUOUS}: b's scale must be float32 or int32; got float32 for a, bfloat16 for b.",
        "Pack powers of two, or pass fp32.",
        kind=TypeError,
    ):
        calls.contiguous(b=(calls.e4m3(E, N, K), torch.ones(E, 1, 4).bfloat16()))
    with refuses(
        f"{CONTIGUOUS}: recipe must be alone, or recipe_a with recipe_b; got recipe=None,",
        "recipe_a=(1, 128), recipe_b=None. Give one recipe of three, or both pairs, or none.",
    ):
        calls.contiguous(recipe_a=(1, 128))
    with refuses(
        f"{CONTIGUOUS}: recipe must be alone, or recipe_a with recipe_b; got recipe=(1, 128, 128),",
        "recipe_a=(1, 128), recipe_b=(1, 128).",
        "Give one recipe of three, or both pairs, or none.",
    ):
        calls.contiguous(recipe=(1, 128, 128), recipe_a=(1, 128), recipe_b=(1, 128))
    with refuses(
        f"{CONTIGUOUS}: recipe must be of 3 numbers; got (1, 128).",
        "See scales.py for their meaning.",
    ):
        calls.contiguous(recipe=(1, 128))
    with refuses(
        f"{CONTIGUOUS}: scales must be UE8M0 in the end on sm100; got float32 for a,",
        "float32 for b. Leave disable_ue8m0_cast False.",
        kind=NotImplementedError,
    ):
        calls.contiguous(disable_ue8m0_cast=True)


@pytest.mark.parametrize("which", ["a", "b"])
def test_per_tensor_scale_in_blocks_is_no_power_of_two(calls, which, refuses):
    """A per-tensor fp8 checkpoint, its one scale spread over the blocks."""
    scales = {"a": torch.full((M, 4), 0.0137), "b": torch.full((E, 1, 4), 0.0137)}
    index = "0, 0" if which == "a" else "0, 0, 0"
    value = scales["a"][0, 0].item()
    with refuses(
        f"{CONTIGUOUS}: {which}'s scale[{index}] must be a positive power of two; got {value!r}.",
        "Round scales up with ceil_to_ue8m0 before quantising with them;",
        "rounding only the scale changes every value of its group.",
    ):
        calls.contiguous(
            **{which: (calls.e4m3(M, K) if which == "a" else calls.e4m3(E, N, K), scales[which])},
        )
    with deep_gemm.arch(9):  # fp32 scales are just numbers there
        calls.contiguous(
            **{which: (calls.e4m3(M, K) if which == "a" else calls.e4m3(E, N, K), scales[which])},
        )


def test_block_sizes(calls, refuses):
    setter = deep_gemm.set_mk_alignment_for_contiguous_layout
    name = f"{BF16}: get_mk_alignment_for_contiguous_layout() must be"
    setter(224)
    calls.bf16()
    with (
        deep_gemm.arch(9),
        refuses(f"{name} 16, 32, 48, 64 or a multiple of 128 on sm90; got 224. Use 128."),
    ):
        calls.bf16()
    with (
        deep_gemm.arch(12),
        refuses(f"{name} 32, 64 or a multiple of 128 on sm120; got 224. Use 128."),
    ):
        calls.bf16()
    setter(256)
    with refuses(f"{name} a multiple of 16 up to 240 on sm100; got 256. Use 224."):
        calls.bf16()
    setter(32)
    with (
        deep_gemm.arch(12),
        refuses(f"{name} at least 64 on sm120 for n=24 <= 32; got 32. Use 128."),
    ):
        calls.bf16()


def test_what_the_copy_engine_wants(calls, refuses):
    shifted = torch.ones(M * K + 1).to(torch.float8_e4m3fn)[1:].view(M, K)
    with refuses(
        f"{CONTIGUOUS}: a must be at an address that is a multiple of 16 bytes;",
        "got one 1 bytes past it. Do not slice in front of it; copy it.",
    ):
        calls.contiguous(a=(shifted, torch.ones(M, 4)))
    narrow = {"a": torch.ones(M, 36).bfloat16(), "b": torch.ones(E, N, 36).bfloat16()}
    with refuses(
        f"{BF16}: a must be laid out with a pitch that is a multiple of 16 bytes; got 72 bytes.",
        "Pad the contiguous dimension.",
    ):
        calls.bf16(**narrow)
    thin = {"b": torch.ones(E, 12, K).bfloat16(), "d": torch.empty(M, 12, dtype=torch.bfloat16)}
    with refuses(
        f"{BF16}: d must be laid out with a pitch that is a multiple of 16 bytes; got 24 bytes.",
        "Pad the contiguous dimension.",
    ):
        calls.bf16(**thin)
    with deep_gemm.arch(12):
        calls.bf16(**thin)
    with deep_gemm.arch(9):
        with refuses(f"{BF16}: n must be a multiple of 8 on sm90; got 12. Pad b with zero rows."):
            calls.bf16(**thin)
        with refuses(
            f"{BF16}: k must be a multiple of 64 on sm90; got 40. Pad a and b with zero columns.",
        ):
            calls.bf16(a=torch.ones(M, 40).bfloat16(), b=torch.ones(E, N, 40).bfloat16())
    words = torch.ones(1, M + 4, dtype=torch.int32).mT[1 : M + 1].as_strided((M, 1), (1, M))
    with refuses(
        f"{CONTIGUOUS}: a's scale must be at an address that is a multiple of 16 bytes;",
        "got 4 bytes past it. Do not slice in front of it; copy it.",
    ):
        calls.contiguous(a=(calls.e4m3(M, K), words))


def test_packed_e2m1_comes_in_128s(calls, refuses):
    fp4 = (calls.e4m3(E, N, 80).view(torch.int8), torch.ones(E, N, 5))
    with refuses(
        f"{CONTIGUOUS}: b must be a multiple of 128 values along its contiguous dimension",
        "(packed e2m1); got 160. Pad it with zeros.",
    ):
        calls.contiguous(
            a=(calls.e4m3(M, 160), torch.ones(M, 2)),
            b=fp4,
            recipe_a=(1, 128),
            recipe_b=(1, 32),
        )


def test_k_that_is_no_multiple_of_the_group(calls, refuses):
    """K = 48, group 32: the last group is short; a scale too few is named, not read past."""
    a, b = calls.e4m3(M, 48), calls.e4m3(E, N, 48)
    calls.contiguous(a=(a, torch.ones(M, 2)), b=(b, torch.ones(E, N, 2)), recipe=(1, 1, 32))
    with refuses(
        f"{CONTIGUOUS}: a's scale must be of shape (16, 2) for mn=16, k=48, float32, 1x32 a scale;",
        "got (16, 1). Check the recipe, and which dtype the scales are in.",
    ):
        calls.contiguous(a=(a, torch.ones(M, 1)), b=(b, torch.ones(E, N, 2)), recipe=(1, 1, 32))


def test_masked_packs_padding_rows_too(calls, refuses):
    """The library converts whole slabs: garbage scales past masked_m stop its kernel as well."""
    scale = torch.ones(E, M, 4)
    scale[1, 9, 0] = float("nan")
    counts = torch.tensor([3, 3], dtype=torch.int32)
    with refuses(
        f"{MASKED}: a's scale[1, 9, 0] must be a positive power of two; got nan.",
        "Round scales up with ceil_to_ue8m0 before quantising with them;",
        "rounding only the scale changes every value of its group.",
    ):
        calls.masked(a=(calls.e4m3(E, M, K), scale), masked_m=counts)
