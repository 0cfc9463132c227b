"""The kernels of the gathered and direct layouts compile to the matrix instruction they are meant for.

Every tile of the tables once for each card. GEMM1 is compiled with a bias and a long formula, which takes the most
registers.
"""

import pytest
import torch

from moe_ops.kernels.gated_gemm import GATED_TILES
from moe_ops.meta.grouped_gemm import BLOCKS_M, weight_scale_spec
from moe_ops.meta.quantize import row_specs
from moe_ops.ops.gated_gemm import DIRECT as GATED_DIRECT
from moe_ops.ops.gated_gemm import GATHERED as GATED_GATHERED
from moe_ops.ops.grouped_gemm import DIRECT, GATHERED
from moe_ops.ops.pre_permute import GATHERED as PRE_GATHERED
from moe_ops.recipes import RECIPES
from moe_ops.testing.aot import Compiled, compiling, launch
from moe_ops.testing.fused_cases import FUSED_FORMS

PLAIN = dict(activation="silu", swiglu_limit=None, gemm1_alpha=None, gemm1_clamp_limit=None)
LONG = PLAIN | dict(gemm1_alpha=1.7, gemm1_clamp_limit=7.0)
LIMITED = PLAIN | dict(swiglu_limit=7.0)
SITU = PLAIN | dict(activation="situ", gemm1_alpha=4.0, gemm1_clamp_limit=25.0)
PRODUCTS = {
    ("sm90", "bf16"): r"^wgmma.*\.f32\.bf16\.bf16$",
    ("sm90", "fp8_block"): r"^wgmma.*k32\.f32\.e4m3\.e4m3$",
    ("sm100", "bf16"): r"^tcgen05\.mma.*kind::f16$",
    ("sm100", "fp8_block"): r"^tcgen05\.mma.*kind::f8f6f4$",
    ("sm120", "bf16"): r"^mma\.sync.*bf16\.bf16",
    ("sm120", "fp8_block"): r"^mma\.sync.*e4m3\.e4m3",
}
K, I = 2048, 768
each_form = pytest.mark.parametrize("recipe, scale_format", FUSED_FORMS, ids=["-".join(form) for form in FUSED_FORMS])
each_arch = pytest.mark.parametrize("arch", ["sm90", "sm100"])


def meta(*shape, dtype=torch.int32):
    return torch.empty(*shape, dtype=dtype, device="meta")


def weight(recipe, scale_format, E, N, K):
    row = RECIPES[recipe]
    scale = weight_scale_spec(E, N, K, row, scale_format).empty("meta") if row.quantised else None
    return dict(w=meta(E, N, K, dtype=row.w_dtype), w_scale=scale, recipe=recipe)


def rows(recipe, scale_format, *shape):
    x, scale = row_specs(*shape, recipe=RECIPES[recipe], scale_format=scale_format)
    return dict(x=x.empty("meta"), x_scale=scale.empty("meta"))


def compiled(arch, op, **arguments) -> list[Compiled]:
    with compiling(arch) as kernels:
        launch(op, **arguments)
    return kernels


def gated(arch, recipe, scale_format, block_m, formula) -> Compiled:
    bias = None if formula is PLAIN else meta(8, 2 * I, dtype=torch.bfloat16)
    (kernel,) = compiled(
        arch,
        GATED_GATHERED,
        **rows(recipe, scale_format, 64, K),
        **weight(recipe, scale_format, 8, 2 * I, K),
        **formula,
        bias=bias,
        tiles=meta(3, 40),
        block_m=block_m,
        row_token=meta(512),
        scale_format=scale_format,
        weight_format="natural",
    )
    return kernel


def grouped(arch, recipe, scale_format, block_m) -> Compiled:
    (kernel,) = compiled(
        arch,
        GATHERED,
        **rows(recipe, scale_format, 512, I),
        **weight(recipe, scale_format, 8, K, I),
        tiles=meta(3, 40),
        block_m=block_m,
        weight_format="natural",
    )
    return kernel


def direct(arch, recipe, scale_format, K, I) -> tuple[Compiled, Compiled]:
    common = dict(topk_ids=meta(1, 8), expert_start=0, scale_format=scale_format)
    tokens = dict(hidden_states=meta(1, K, dtype=torch.bfloat16), bias=None)
    (first,) = compiled(arch, GATED_DIRECT, **weight(recipe, scale_format, 8, 2 * I, K), **PLAIN, **common, **tokens)
    (second,) = compiled(
        arch, DIRECT, **weight(recipe, scale_format, 8, K, I), **common, x=meta(8, I, dtype=torch.float32)
    )
    return first, second


@each_arch
@each_form
@pytest.mark.parametrize("block_m", BLOCKS_M)
def test_gathered(block_m, recipe, scale_format, arch):
    gated(arch, recipe, scale_format, block_m, LONG).check(PRODUCTS[arch, recipe])
    grouped(arch, recipe, scale_format, block_m).check(PRODUCTS[arch, recipe])


@each_arch
@each_form
def test_the_longest_formula_in_the_largest_tile(recipe, scale_format, arch):
    gated(arch, recipe, scale_format, 128, SITU).check(PRODUCTS[arch, recipe])


def test_hopper_has_kernels_of_its_own_for_many_rows():
    """Registers go from the warps that bring operands to those that multiply; products overlap with sums."""
    first = [gated("sm90", "fp8_block", "fp32", 128, formula) for formula in (PLAIN, LIMITED)]
    for kernel in (*first, grouped("sm90", "fp8_block", "fp32", 128)):
        kernel.check(PRODUCTS["sm90", "fp8_block"])
        assert kernel.name == "_pipelined_kernel" and kernel.warps == 12
        assert "setmaxnreg.inc" in kernel.ptx and "cp.async.bulk.tensor" in kernel.ptx


@each_arch
@each_form
def test_direct(recipe, scale_format, arch):
    """GEMM1 of two widths; a K above 4096 has more groups than the smallest operand."""
    for kernels in (direct(arch, recipe, scale_format, K, I), direct(arch, recipe, scale_format, 7168, 2048)[:1]):
        for kernel in kernels:
            kernel.check(PRODUCTS[arch, recipe] if recipe != "bf16" else None)


def permuted(arch, T, E, top_k, K, recipe, scale_format) -> list[str]:
    """Compiles and checks the routing of T tokens; returns its kernels' names."""
    kernels = compiled(
        arch,
        PRE_GATHERED,
        hidden_states=meta(T, K, dtype=torch.bfloat16),
        topk_ids=meta(T, top_k),
        num_local_experts=E,
        block_m=64,
        expert_start=0,
        recipe=recipe,
        scale_format=scale_format,
    )
    for kernel in kernels:
        kernel.check()
    return [kernel.name for kernel in kernels]


@each_arch
@each_form
def test_few_routes(recipe, scale_format, arch):
    assert permuted(arch, 1, 128, 8, 2048, recipe, scale_format) == ["_sort_kernel"]


@each_arch
def test_many_routes(arch):
    assert permuted(arch, 4096, 1024, 32, 7168, "fp8_block", "ue8m0") == ["_count_kernel", "_place_kernel"]


@pytest.mark.parametrize("recipe, scale_format", FUSED_FORMS[:2], ids=["bf16", "fp8"])
def test_a_small_tile_fits_a_workstation(recipe, scale_format):
    gated("sm120", recipe, scale_format, 16, LONG).check(PRODUCTS["sm120", recipe])
    grouped("sm120", recipe, scale_format, 16).check(PRODUCTS["sm120", recipe])


def test_every_kind_has_every_tile():
    assert all(tuple(tiles) == BLOCKS_M for kinds in GATED_TILES.values() for tiles in kinds.values())


@pytest.mark.parametrize("scale_format", ["fp32", "ue8m0"])
def test_a_dependent_kernel_waits_before_it_reads(scale_format):
    """Nothing in the compiler's language keeps a load behind the wait; the machine code must show it."""
    texts = [text for _, text in grouped("sm90", "fp8_block", scale_format, 16).instructions]
    wait = next(i for i, text in enumerate(texts) if "ACQBULK" in text)
    loads = [
        i
        for i, text in enumerate(texts)
        if text.split()[0 if not text.startswith("@") else 1].startswith(("LDG", "UTMALDG"))
    ]
    assert loads and wait < min(loads)
