"""From packed e2m1 codes to e4m3 operands in registers, in the order that prep/repack.py gave the codes.

A 32-bit word of eight codes becomes two registers of four numbers, columns k to k + 3 and k + 32 to k + 35. Each is a
piece of the left operand of a product over 32 columns, which is one scale group, so activations keep their order.

What holds the speed, and what tests/aot checks: no operand may come from anything but loads inside the loop. Triton
would otherwise expand in another register layout and go through shared memory on the way to the tensor core.
"""

import triton.language as tl

from moe_ops.kernels.launch import jit
from moe_ops.weight_format import SPAN

SHIFTED_UNIT = tl.constexpr(2.0**6)
"""expand_shifted's numbers are to be multiplied by it."""
INDEXED_UNIT = tl.constexpr(2.0 ** (5 - SPAN))
"""expand_indexed's, for exponents that count from SPAN below the largest."""


# 2^(byte - 127) of the exponent in bits 23 to 30, wherever a shift has put it. Byte 0 gives 0; there is no 255.
@jit
def power(bits):
    return (bits & 0x7F800000).to(tl.float32, bitcast=True)


# Eight codes a word -> their numbers times 2^-6: (columns 0 to 31, columns 32 to 63) in e4m3. Only bits move.
@jit
def expand_shifted(codes):
    first, second = tl.inline_asm_elementwise(
        """{
        .reg .b32 left, right;
        and.b32 $0, $2, 0x9C9C9C9C;
        shl.b32 left, $2, 2;
        and.b32 left, left, 0x8C8C8C8C;
        shr.b32 right, $2, 2;
        lop3.b32 $1, right, 0x10101010, left, 0xEA;
        }""",  # 0xEA: (a & b) | c
        "=r,=r,r",
        [codes],
        dtype=(tl.uint8, tl.uint8),
        is_pure=True,
        pack=4,
    )
    return first.to(tl.float8e4nv, bitcast=True), second.to(tl.float8e4nv, bitcast=True)


# The same by tables: bytes 0 to 3 and 4 to 7 of one table serve columns 0 to 31, those of another columns 32 to 63.
# A table is one value a row, which reaches the instructions as four equal registers, $3 to $6 and so on.
@jit
def _look_up(codes, low_0, high_0, low_1, high_1):
    first, second = tl.inline_asm_elementwise(
        """{
        .reg .b32 index, size;
        and.b32 index, $2, 0x77777777;
        prmt.b32 size, $3, $7, index;
        lop3.b32 $0, $2, 0x80808080, size, 0xEA;
        shr.b32 index, index, 16;
        prmt.b32 size, $11, $15, index;
        shl.b32 index, $2, 4;
        lop3.b32 $1, index, 0x80808080, size, 0xEA;
        }""",
        "=r,=r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r",
        [codes, low_0, high_0, low_1, high_1],
        dtype=(tl.uint8, tl.uint8),
        is_pure=True,
        pack=4,
    )
    return first.to(tl.float8e4nv, bitcast=True), second.to(tl.float8e4nv, bitcast=True)


# Codes whose groups have exponents `first` and `second` in 0 to SPAN -> numbers times 2^(exponent - 5). A table is that
# of 2^-5 (e4m3 bytes 00 08 10 14, 18 1C 20 24) with the exponent added to every byte but that of zero.
@jit
def expand_indexed(codes, first, second):
    low_0, high_0 = first * 0x08080800 + 0x14100800, first * 0x08080808 + 0x24201C18
    low_1, high_1 = second * 0x08080800 + 0x14100800, second * 0x08080808 + 0x24201C18
    return _look_up(codes, low_0[:, None], high_0[:, None], low_1[:, None], high_1[:, None])
