"""The GEMMs over repacked MXFP4 weights compile for sm_90 as they were measured: codes go from shared memory through
registers into the tensor core, and nothing goes back."""

import re
from dataclasses import replace
from unittest import mock

import pytest
import torch

from moe_ops.kernels import w4a8
from moe_ops.kernels.w4a8 import Tile, choose_tile, gated_gemm_gathered, grouped_gemm_gathered
from moe_ops.meta.grouped_gemm import BLOCKS_M, weight_scale_spec
from moe_ops.meta.pack_scale import packed_scale_spec
from moe_ops.recipes import RECIPES
from moe_ops.testing.aot import Compiled, compiling
from moe_ops.testing.w4a8_cases import FORMULAS, PLAIN
from moe_ops.weight_format import FORMATS

REPACKED = [row.name for row in FORMATS.values() if row.repacked]
MANY, FEW = 64, 1
"""Experts with a token tile each: more programs than the card holds, and fewer."""


def compile_gemm(gated, weight_format, block_m, E=MANY, bias=None, formula=None, K=2048, I=1536) -> Compiled:
    def meta(*shape, dtype=torch.int32):
        return torch.empty(*shape, dtype=dtype, device="meta")

    R = E * block_m
    N, depth = (2 * I, K) if gated else (K, I)
    weight = dict(
        w=FORMATS[weight_format].w_spec(E, N, depth).empty("meta"),
        w_scale=weight_scale_spec(E, N, depth, RECIPES["mxfp4"], "ue8m0").empty("meta"),
        weight_format=weight_format,
    )
    rows = dict(
        x=meta(R, depth, dtype=torch.float8_e4m3fn),
        x_scale=packed_scale_spec(R, depth // 128, scale_format="ue8m0").empty("meta"),
        tiles=meta(3, E),
    )
    options: dict = dict(block_m=block_m)
    with compiling("sm90") as compiled:
        if gated:
            act = meta(R, I, dtype=torch.float8_e4m3fn)
            act_scale = packed_scale_spec(R, I // 128, scale_format="ue8m0").empty("meta")
            options |= (
                dict(recipe="mxfp4", scale_format="ue8m0", row_token=meta(R), bias=bias) | PLAIN | (formula or {})
            )
            gated_gemm_gathered((act, act_scale), **rows, **weight, **options)
        else:
            grouped_gemm_gathered((meta(R, K, dtype=torch.bfloat16),), **rows, **weight, **options)
    (kernel,) = compiled
    return kernel


def main_loop(kernel: Compiled) -> list[str]:
    """The instructions of the loop with the most matrix products."""
    code, best = kernel.instructions, []
    for at, text in code:
        target = re.search(r"BRA\S* .*?0x([0-9a-f]+)", text)
        if target and int(target[1], 16) < at:
            body = [line for place, line in code if int(target[1], 16) <= place <= at]
            best = max(best, body, key=lambda lines: (sum("QGMMA" in line for line in lines), -len(lines)))
    return best


def count(lines: list[str], pattern: str) -> int:
    return sum(bool(re.search(rf"(^|\s){pattern}", line)) for line in lines)


def check(kernel: Compiled) -> None:
    kernel.check(r"^wgmma\.mma_async.*k32\.f32\.e4m3\.e4m3$")
    loop = main_loop(kernel)
    assert count(loop, "QGMMA") >= 4, f"{kernel}: no loop of products"
    assert count(loop, r"STS[. ]") == 0, f"{kernel}: the loop stores to shared memory"
    assert count(loop, r"LDG[. ]") == 0 and count(loop, "LDGSTS"), f"{kernel}: loads that nothing overlaps"


CASES = [(gated, name, block_m, MANY) for gated in (True, False) for name in REPACKED for block_m in (16, 32, 64)]
# Few programs: sm90_row is sm90_block but for its factor, which it applies behind the loop.
CASES += [(True, name, 64, FEW) for name in REPACKED if name != "sm90_row"] + [
    (gated, "sm90_group", 16, FEW) for gated in (True, False)
]


@pytest.mark.parametrize("gated, weight_format, block_m, E", CASES, ids=str)
def test_every_tile_compiles_as_meant(gated, weight_format, block_m, E):
    check(compile_gemm(gated, weight_format, block_m, E))


FORMULA_CASES = list(zip(REPACKED, (64, 32, 16), FORMULAS, strict=True))


@pytest.mark.parametrize("weight_format, block_m, formula", FORMULA_CASES, ids=str)
def test_every_formula_compiles(weight_format, block_m, formula):
    bias = torch.empty(MANY, 2 * 1536, dtype=torch.bfloat16, device="meta")
    check(compile_gemm(True, weight_format, block_m, bias=bias, formula=formula))


@pytest.mark.parametrize("gated", [True, False], ids=["gated", "down"])
def test_sizes_of_one(gated):
    """A size or stride of 1 is a constant to Triton: one tile, one group."""
    check(compile_gemm(gated, "sm90_row", 16, E=1, K=128, I=128))


@pytest.mark.parametrize("gated", [True, False], ids=["gated", "down"])
def test_a_dependent_waits_before_it_loads(gated):
    """gdc_wait does not tell the compiler that it orders memory."""
    code = [line for _, line in compile_gemm(gated, "sm90_row", 16).instructions]
    waits = [index for index, line in enumerate(code) if "ACQBULK" in line]
    loads = [index for index, line in enumerate(code) if re.search(r"(^|\s)(LDG|LDGSTS|LD)[. ]", line)]
    assert waits and waits[0] < loads[0]


def test_decode_leaves_room_for_several_programs():
    """A multiprocessor hides latency with other programs, and issues some three instructions a code at full bandwidth.
    A program of GEMM1 is twice as large."""
    for gated, programs, codes in ((False, 4, 128), (True, 3, 256)):
        for name in REPACKED:
            kernel = compile_gemm(gated, name, 16)
            assert kernel.registers * 32 * kernel.warps * programs <= 65536, str(kernel)
            assert len(main_loop(kernel)) < 3 * codes, str(kernel)


def test_the_table_serves_every_size():
    for gated in (True, False):
        for name in REPACKED:
            for block_m in BLOCKS_M:
                assert block_m // choose_tile(gated, name, block_m, 10**6).parts in (16, 32, 64)
            half = choose_tile(gated, name, 64, 10**6)  # 128 rows are compiled as these are
            assert choose_tile(gated, name, 128, 10**6) == replace(half, parts=2 * half.parts)
    assert choose_tile(True, "sm90_row", 16, 264).stages > choose_tile(True, "sm90_row", 16, 265).stages


def test_the_gate_catches_a_detour():
    """With eight warps a tile of 16 tokens is too small for asynchronous copies."""
    with mock.patch.object(w4a8, "choose_tile", lambda *_: Tile(8, 3)):
        kernel = compile_gemm(False, "sm90_row", 16)
    with pytest.raises(AssertionError, match="the loop stores to shared memory"):
        check(kernel)
