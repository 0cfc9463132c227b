"""Runs the PTX of tl.inline_asm_elementwise on numpy arrays, so that the interpreter tries the text that ships.

Straight lines of the 32-bit instructions below, as PTX defines them; anything else is an error.
"""

import re

import numpy as np


def run_asm(text: str, inputs: list[np.ndarray], dtypes: list[np.dtype], pack: int) -> list[np.ndarray]:
    """The outputs, one of each dtype, of `pack` elements at a time in 32-bit registers.

    Args:
        text: outputs are its first registers ($0 on), inputs follow.
        inputs: arrays of one shape. `pack` neighbours along their last axis go into one call.
    """
    shape = inputs[0].shape
    names = [f"${index}" for index in range(sum(_registers(dtype, pack) for dtype in dtypes))]
    taken = len(names)
    values: dict[str, np.ndarray] = {}
    for array in inputs:
        words = np.ascontiguousarray(array).reshape(-1, pack).view(np.uint32)
        for column in words.T:
            values[f"${taken}"] = column
            taken += 1
    for line in re.sub(r"//[^\n]*|[{}]", "", text).split(";"):
        if line.strip() and not line.strip().startswith(".reg"):
            opcode, operands = line.split(None, 1)
            target, *sources = (operand.strip() for operand in operands.split(","))
            values[target] = _execute(opcode, [_read(values, source) for source in sources])
    outputs = []
    for dtype in dtypes:
        used, names = names[: _registers(dtype, pack)], names[_registers(dtype, pack) :]
        words = np.stack([np.broadcast_to(values[name], (inputs[0].size // pack,)) for name in used], 1)
        outputs.append(np.ascontiguousarray(words).view(dtype).reshape(shape))
    return outputs


def _registers(dtype: np.dtype, pack: int) -> int:
    return max(np.dtype(dtype).itemsize * pack // 4, 1)


def _read(values: dict[str, np.ndarray], operand: str) -> np.ndarray:
    return values[operand] if operand in values else np.array(int(operand, 0), np.uint32)


def _execute(opcode: str, sources: list[np.ndarray]) -> np.ndarray:
    if opcode not in _INSTRUCTIONS:
        raise NotImplementedError(f"the interpreter has no {opcode}: add it to moe_ops/testing/ptx.py")
    return _INSTRUCTIONS[opcode](*sources)


def _lop3(a, b, c, table):
    """Bit by bit: bit 4 a + 2 b + c of the table."""
    result = np.uint32(0)
    for index in range(8):
        if int(table) >> index & 1:
            result = result | ((a if index & 4 else ~a) & (b if index & 2 else ~b) & (c if index & 1 else ~c))
    return result


def _prmt(a, b, selector):
    """Each nibble of the selector picks one of the bytes of b:a; its top bit, that byte's sign eight times."""
    result = np.uint32(0)
    for place in range(4):
        nibble = selector >> np.uint32(4 * place)
        source = np.where(nibble & 4, b, a)
        byte = source >> (nibble & 3) * np.uint32(8) & np.uint32(0xFF)
        byte = np.where(nibble & 8, np.where(byte & 0x80, np.uint32(0xFF), np.uint32(0)), byte)
        result = result | byte << np.uint32(8 * place)
    return result


def _reciprocal(a):
    """Correctly rounded, where a card may be a step off; what is subnormal counts as 0."""
    with np.errstate(divide="ignore"):
        return _flushed(np.float32(1.0) / _flushed(a.view(np.float32))).view(np.uint32)


def _flushed(x):
    return np.where(np.abs(x) < np.finfo(np.float32).tiny, np.copysign(np.float32(0.0), x), x)


_INSTRUCTIONS = {
    "and.b32": lambda a, b: a & b,
    "or.b32": lambda a, b: a | b,
    "shl.b32": lambda a, count: a << count,
    "shr.b32": lambda a, count: a >> count,
    "lop3.b32": _lop3,
    "prmt.b32": _prmt,
    "rcp.approx.ftz.f32": _reciprocal,
}
