"""The dense GEMMs compile to the matrix instructions they are meant for, without spills, within the limits."""

from dataclasses import replace

import pytest
import torch

from moe_ops.kernels.grouped_gemm import TILES, kind_of
from moe_ops.meta.grouped_gemm import matrix_scale_spec
from moe_ops.meta.quantize import row_specs
from moe_ops.ops.gemm_nt_bf16_fp32 import GEMM_NT_BF16_FP32
from moe_ops.ops.gemm_nt_fp8 import GEMM_NT_FP8
from moe_ops.ops.gemm_nt_mxfp8 import GEMM_NT_MXFP8
from moe_ops.ops.hc_prenorm_gemm import HC_PRENORM_GEMM
from moe_ops.recipes import DENSE, RECIPES
from moe_ops.testing.aot import compiling, launch

ARCHS = ("sm90", "sm100", "sm120")
BF16 = {
    "sm90": r"^wgmma.*\.f32\.bf16\.bf16$",
    "sm100": r"^tcgen05\.mma.*kind::f16$",
    "sm120": r"^mma\.sync.*bf16\.bf16",
}
E4M3 = {
    "sm90": r"^wgmma.*k32\.f32\.e4m3\.e4m3$",
    "sm100": r"^tcgen05\.mma.*kind::f8f6f4$",
    "sm120": r"^mma\.sync.*e4m3\.e4m3",
}
SCALED = {
    "sm90": BF16["sm90"],  # exact copies: Hopper has no block-scaled product
    "sm100": r"^tcgen05\.mma.*kind::mxf8f6f4\.block_scale",
    "sm120": r"^mma\.sync.*mxf8f6f4\.block_scale",
}
QUANTISED = {"fp8-fp32": (GEMM_NT_FP8, "fp32", E4M3), "fp8-ue8m0": (GEMM_NT_FP8, "ue8m0", E4M3)}
QUANTISED["mxfp8"] = (GEMM_NT_MXFP8, "ue8m0", SCALED)
each_arch = pytest.mark.parametrize("arch", ARCHS)


def meta(*shape, dtype=torch.bfloat16):
    return torch.empty(*shape, dtype=dtype, device="meta")


def compile_one(arch, product, op, spilled=0, **arguments) -> None:
    with compiling(arch) as kernels:
        launch(op, **arguments)
    (kernel,) = kernels
    assert kernel.spilled <= spilled, str(kernel)
    replace(kernel, spilled=0).check(product)


def quantised(op, scale_format, M, N, K) -> dict:
    recipe = RECIPES[DENSE[op.name]]
    x, x_scale = (spec.empty("meta") for spec in row_specs(M, K, recipe=recipe, scale_format=scale_format))
    w_scale = matrix_scale_spec(N, K, recipe=recipe, scale_format=scale_format).empty("meta")
    return dict(x=x, x_scale=x_scale, w=meta(N, K, dtype=recipe.w_dtype), w_scale=w_scale)


@each_arch
@pytest.mark.parametrize("form", QUANTISED)
def test_every_tile_compiles_as_meant(form, arch):
    op, scale_format, products = QUANTISED[form]
    for tile in TILES[arch][kind_of(RECIPES[DENSE[op.name]], scale_format)]:
        compile_one(arch, products[arch], op, **quantised(op, scale_format, tile.rows, 7168, 2048))


@pytest.mark.parametrize("arch", ARCHS[:2])
def test_ragged_sizes_compile_as_meant(arch):
    """No multiple of a tile's columns or depth, and a single row, column and group."""
    for form, K in (("fp8-fp32", 128), ("fp8-ue8m0", 128), ("mxfp8", 2080)):
        op, scale_format, products = QUANTISED[form]
        for M, N in ((1, 1), (200, 130)):
            # One column of a weight with packed scales: triton 3.7.1 runs out of registers there, 3.6.0 does not.
            spilled = 20 if (arch, form, N) == ("sm100", "fp8-ue8m0", 1) else 0
            compile_one(arch, products[arch], op, spilled=spilled, **quantised(op, scale_format, M, N, K))
    for M, N, K in ((1, 1, 16), (3, 130, 2064), (200, 130, 2064)):
        compile_one(arch, BF16[arch], GEMM_NT_BF16_FP32, x=meta(M, K), w=meta(N, K))
    fn = meta(1, 64, dtype=torch.float32)
    compile_one(arch, BF16[arch], HC_PRENORM_GEMM, x=meta(1, 64), fn=fn, num_splits=None)


@each_arch
def test_a_k_that_is_loaded_value_by_value_compiles(arch):
    for M, K in ((1, 77), (60, 77), (60, 7170)):
        compile_one(arch, BF16[arch], GEMM_NT_BF16_FP32, x=meta(M, K), w=meta(256, K))


@each_arch
def test_routers_compile_as_meant(arch):
    for M in (1, 4096):  # both tiles; a ragged M is compiled above
        compile_one(arch, BF16[arch], GEMM_NT_BF16_FP32, x=meta(M, 7168), w=meta(256, 7168))


@each_arch
@pytest.mark.parametrize("N", [8, 24, 128])
def test_prenorm_compiles_as_meant(N, arch):
    """Each width of a column tile."""
    fn = meta(N, 28672, dtype=torch.float32)
    compile_one(arch, BF16[arch], HC_PRENORM_GEMM, x=meta(4096, 28672), fn=fn, num_splits=None)
