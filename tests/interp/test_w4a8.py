"""The GEMMs over repacked MXFP4 weights against float64, their inline assembly included."""

import numpy as np
import pytest

from moe_ops.testing.ptx import run_asm
from moe_ops.testing.w4a8_cases import CASES

# A tile of 128 rows is two of 64. The card runs every case.
SOME = [case for case in CASES if case.block_m in (16, 128) or case.weight_format == "sm90_row" and case.block_m == 32]


@pytest.mark.parametrize("case", SOME, ids=str)
def test_gated_gemm(case):
    case.check_gated()


@pytest.mark.parametrize("case", SOME, ids=str)
def test_grouped_gemm(case):
    case.check_down()


def asm(text, *inputs, dtypes=(np.uint32,), pack=1):
    return run_asm(text, [np.asarray(array) for array in inputs], [np.dtype(dtype) for dtype in dtypes], pack)


def test_assembly_runs_as_ptx_defines_it():
    a, b, c = np.random.default_rng(0).integers(0, 2**32, (3, 64), dtype=np.uint32)
    assert (asm("lop3.b32 $0, $1, $2, $3, 0xEA;", a, b, c)[0] == (a & b) | c).all()
    assert (asm("lop3.b32 $0, $1, $2, $3, 0x96;", a, b, c)[0] == a ^ b ^ c).all()
    (moved,) = asm("prmt.b32 $0, $1, $2, $3;", a, b, c)
    for got, *pair, selector in zip(moved, a, b, c, strict=True):
        source = int(pair[1]) << 32 | int(pair[0])
        for place in range(4):
            nibble = int(selector) >> 4 * place & 15
            byte = source >> 8 * (nibble & 7) & 255
            assert int(got) >> 8 * place & 255 == (255 * (byte >> 7) if nibble & 8 else byte)


def test_assembly_packs_neighbours_into_registers():
    """Bytes four a register, wider operands one each, in scopes with registers of their own."""
    codes, wide = np.arange(8, dtype=np.uint8), np.arange(8, dtype=np.int32) * 0x01010101
    text = "{ .reg .b32 t; shl.b32 t, $2, 4; and.b32 $0, t, 0xF0F0F0F0; or.b32 $1, $4, $2; // of the second\n }"
    one, two = asm(text, codes, wide, dtypes=(np.uint8, np.uint8), pack=4)
    assert one.tolist() == [16 * code for code in codes]
    assert two.tolist() == [code | (1 if index < 4 else 5) for index, code in enumerate(codes)]


def test_assembly_it_does_not_know_is_refused():
    with pytest.raises(NotImplementedError, match="the interpreter has no popc.b32"):
        asm("popc.b32 $0, $1;", np.zeros(4, np.uint32))
