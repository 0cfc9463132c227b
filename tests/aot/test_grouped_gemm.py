"""Every tile of every recipe compiles to the matrix instruction it is meant for, without spills, within the limits."""

from unittest import mock

import pytest
import torch

from moe_ops.kernels import grouped_gemm as kernels
from moe_ops.kernels.grouped_gemm import TILES, Tile, choose_tile, kind_of
from moe_ops.meta.grouped_gemm import weight_scale_spec
from moe_ops.meta.quantize import row_specs
from moe_ops.ops import grouped_gemm as ops
from moe_ops.recipes import RECIPES
from moe_ops.rows import BLOCK
from moe_ops.testing import FORMS
from moe_ops.testing.aot import compiling, launch

ARCHS = ("sm90", "sm100", "sm120")
PRODUCTS = {
    ("sm90", "bf16"): r"^wgmma.*\.f32\.bf16\.bf16$",
    ("sm90", "block"): r"^wgmma.*k32\.f32\.e4m3\.e4m3$",
    ("sm90", "mx"): r"^wgmma.*\.f32\.bf16\.bf16$",  # exact copies: Hopper has no block-scaled product
    ("sm100", "bf16"): r"^tcgen05\.mma.*kind::f16$",
    ("sm100", "block"): r"^tcgen05\.mma.*kind::f8f6f4$",
    ("sm100", "mx"): r"^tcgen05\.mma.*kind::mxf8f6f4\.block_scale",
    ("sm120", "bf16"): r"^mma\.sync.*bf16\.bf16",
    ("sm120", "block"): r"^mma\.sync.*e4m3\.e4m3",
    ("sm120", "mx"): r"^mma\.sync.*(mxf8f6f4\.block_scale|bf16\.bf16)",  # e2m1 weights become bf16 there
}
CASES = [
    pytest.param(arch, RECIPES[recipe], scale, tile, layout, id=f"{arch}-{recipe}-{scale}-{layout}-{tile.rows}")
    for arch in ARCHS
    for recipe, scale in FORMS
    for tile in TILES[arch][kind_of(RECIPES[recipe], scale)]
    for layout in (("contiguous", "masked") if arch != "sm120" else ("masked",))
]


def product_of(arch, recipe) -> str:
    return PRODUCTS[arch, kind_of(recipe, "fp32")]


def compile_gemm(arch, recipe, scale_format, layout, tile: Tile | None = None, mean_rows=1, K=2048, E=8, N=1536):
    """What the launcher compiles for experts of so many rows on average, or for a given tile."""

    def meta(*shape, dtype):
        return torch.empty(*shape, dtype=dtype, device="meta")

    w = meta(E, N, K // recipe.w_pack, dtype=recipe.w_dtype)
    w_scale = weight_scale_spec(E, N, K, recipe, scale_format).empty("meta")
    operands = dict(w=w, w_scale=w_scale if recipe.quantised else None, recipe=recipe.name)
    rows = (E * (BLOCK + mean_rows) // BLOCK * BLOCK,) if layout == "contiguous" else (E, 256)
    x, x_scale = (spec.empty("meta") for spec in row_specs(*rows, K, recipe=recipe, scale_format=scale_format))
    operands |= dict(x=x, x_scale=x_scale if recipe.quantised else None)
    choose = choose_tile if tile is None else lambda *_: tile
    with compiling(arch) as compiled, mock.patch.object(kernels, "choose_tile", choose):
        if layout == "contiguous":
            launch(ops.CONTIGUOUS, **operands, m_indices=meta(*rows, dtype=torch.int32), ends=None)
        else:
            launch(ops.MASKED, **operands, masked_m=meta(E, dtype=torch.int32), expected_m=mean_rows)
    (kernel,) = compiled
    return kernel


@pytest.mark.parametrize("arch, recipe, scale_format, tile, layout", CASES)
def test_every_tile_compiles_as_meant(arch, recipe, scale_format, tile, layout):
    kernel = compile_gemm(arch, recipe, scale_format, layout, tile)
    kernel.check(product_of(arch, recipe))


@pytest.mark.parametrize("arch", ARCHS[:2])
@pytest.mark.parametrize("name, K", [("bf16", 2064), ("mxfp8", 2080)])
def test_a_ragged_k_compiles_as_meant(name, K, arch):
    recipe = RECIPES[name]
    for mean_rows in (1, 64, 128):
        kernel = compile_gemm(arch, recipe, recipe.scale_formats[0], "masked", mean_rows=mean_rows, K=K)
        kernel.check(product_of(arch, recipe))


@pytest.mark.parametrize("recipe, scale_format", FORMS, ids=["-".join(form) for form in FORMS])
def test_a_single_group_compiles(recipe, scale_format):
    """A stride of 1 is a constant to Triton."""
    recipe = RECIPES[recipe]
    for layout in ("contiguous", "masked"):
        kernel = compile_gemm("sm90", recipe, scale_format, layout, K=max(recipe.granule, 16), E=1, N=2)
        kernel.check(product_of("sm90", recipe))


@pytest.mark.parametrize("arch", ARCHS)
def test_the_table_serves_every_number_of_rows(arch):
    for kind, tiles in TILES[arch].items():
        assert [tile.rows for tile in tiles] == sorted({tile.rows for tile in tiles})
        assert all(BLOCK % tile.rows == 0 and BLOCK % tile.columns == 0 for tile in tiles)
        assert [choose_tile(arch, kind, rows) for rows in (0, 1, 10**6)] == [tiles[0], tiles[0], tiles[-1]]


def test_the_gate_catches_a_fallback():
    """64 rows that are not swapped make tl.dot_scaled fall to bf16 on sm_100, without a word from the compiler."""
    kernel = compile_gemm("sm100", RECIPES["mxfp4"], "ue8m0", "contiguous", Tile(64, 128, 128, 4, 3))
    with pytest.raises(AssertionError, match="kind::f16.* instead of"):
        kernel.check(PRODUCTS["sm100", "mx"])


def test_the_gate_catches_spills():
    kernel = compile_gemm("sm100", RECIPES["fp8_block"], "ue8m0", "contiguous", Tile(128, 128, 128, 4, 3))
    with pytest.raises(AssertionError, match="registers ran out"):
        kernel.check(PRODUCTS["sm100", "block"])
