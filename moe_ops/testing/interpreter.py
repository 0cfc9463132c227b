"""Makes Triton's interpreter (TRITON_INTERPRET=1) compute what a card computes. `install()` before a kernel runs.

The interpreter keeps bf16 and fp8 as raw integers in numpy arrays. Seen in Triton 3.6 and 3.7, without this module:

- float32 to bf16 truncates instead of rounding; to e4m3 it rounds half up, the carry damages the exponent, values
  beyond 448 turn into garbage; e4m3's NaN reads as 480. Cards round to nearest even, saturate and keep NaN.
- `tl.dot` of bf16 multiplies the raw integers: wrong by nine orders of magnitude, without a word.
- `tl.dot_scaled` fails: its format names are not wrapped, and the operation itself is missing.
- the arithmetic of bf16 works on raw integers too. Here it is an error: no kernel of this package computes in bf16.
- a kernel's scalar cannot bound a `range` under numpy 2.4 (Triton 3.6).
- `tl.fma` rounds the product, and a NaN that it makes has a sign. A card does neither.
- the larger or smaller of a NaN and a number is NaN. A card's is the number, unless NaN is to be propagated.
- inline assembly is refused. Here ptx.py runs it.
- every call of a device function patches the whole language again, and every look-up of a dtype makes a table: a third
  of all time. Here a launch patches once, and the table is kept.

Torch's casts are the model of a card's; tests/gpu compares the two for every bf16 value.
"""

from types import SimpleNamespace

import numpy as np
import torch

from moe_ops.testing.ptx import run_asm

BITS = {"bf16": (torch.bfloat16, torch.int16, np.uint16), "fp8e4nv": (torch.float8_e4m3fn, torch.uint8, np.uint8)}
"""Triton's name -> torch dtype, torch integers, numpy storage of the floats that numpy does not have."""

_TOP = {"fp8e4nv": 448.0}
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
_BITWISE = (np.bitwise_and, np.bitwise_or, np.bitwise_xor)


def decode(data: np.ndarray, name: str) -> np.ndarray:
    """The values of an array in the interpreter's storage of Triton's dtype `name`; exact."""
    if name not in BITS:
        return data
    dtype, integers, storage = BITS[name]
    raw = np.ascontiguousarray(data).view(storage).view(np.int16 if storage is np.uint16 else np.uint8)
    return torch.from_numpy(raw.copy()).view(dtype).float().numpy().reshape(data.shape)


def encode(values: np.ndarray, name: str) -> np.ndarray:
    """float32 values in the storage of `name`: nearest even, e4m3 saturating, NaN stays NaN."""
    dtype, integers, storage = BITS[name]
    x = torch.from_numpy(np.array(values, np.float32))
    if name in _TOP:
        x = x.clamp(-_TOP[name], _TOP[name])  # keeps NaN; torch before 2.13 casts what is larger to NaN
    return x.to(dtype).view(integers).numpy().view(storage).reshape(np.shape(values))


def dequantise(data: np.ndarray, form: str, scale: np.ndarray | None, right: bool) -> np.ndarray:
    """An operand of tl.dot_scaled as float64: codes packed along K, scales (rows, K / 32) of either side's rows."""
    axis = -2 if right else -1
    if form == "e2m1":
        byte = data.view(np.uint8)
        values = np.stack((_E2M1[byte & 15], _E2M1[byte >> 4]), byte.ndim + axis + 1)
        shape = list(byte.shape)
        shape[axis] *= 2
        values = values.reshape(shape)
    else:
        values = decode(data, {"e4m3": "fp8e4nv", "bf16": "bf16"}[form])
    values = values.astype(np.float64)
    if scale is None:
        return values
    byte = scale.view(np.uint8).astype(np.int32)
    factor = np.repeat(np.where(byte == 255, np.nan, np.ldexp(1.0, byte - 127)), 32, -1)
    return values * (factor.T if right else factor)


def install() -> None:
    """Patches the installed Triton's interpreter: private names, so tests/interp/test_interpreter.py tries each."""
    import triton.language as tl
    from triton.language.semantic import TritonSemantic
    from triton.runtime import interpreter

    handle, builder = interpreter.TensorHandle, interpreter.InterpreterBuilder

    def name(value) -> str:
        return (value.dtype if hasattr(value, "dtype") else value).scalar.name

    def cast(value, kind):
        numbers, target = decode(value.data, name(value)), name(kind)
        if target in BITS:
            return handle(encode(numbers, target), kind.scalar)
        return handle(numbers.astype(interpreter._get_np_dtype(kind)), kind.scalar)

    plain_cast, binary, unary = builder.cast_impl, builder.binary_op, builder.unary_op

    def cast_impl(self, value, kind):
        if name(value) in BITS or name(kind) in BITS:
            return cast(value, kind)
        return plain_cast(self, value, kind)

    def refuse(value) -> None:
        if name(value) in BITS:
            raise TypeError(f"arithmetic in {name(value)}: convert to float32 first, as a card would round differently")

    def binary_op(self, lhs, rhs, op):
        if op not in _BITWISE:
            refuse(lhs)
        return binary(self, lhs, rhs, op)

    def unary_op(self, value, op):
        refuse(value)
        return unary(self, value, op)

    def create_dot(self, a, b, c, input_precision, max_num_imprecise_acc):
        product = np.matmul(*(decode(side.data, name(side)).astype(np.float32) for side in (a, b)))
        return handle(product + c.data, c.dtype.scalar)

    def create_dot_scaled(self, a, a_scale, a_form, b, b_scale, b_form, fast, a_packed, b_packed, c):
        assert a_packed and b_packed, "codes must be packed along K"
        left, right = (
            dequantise(side.data, form.name.lower(), None if scale is None else scale.data, is_right)
            for side, form, scale, is_right in ((a, a_form, a_scale, False), (b, b_form, b_scale, True))
        )
        return handle((np.matmul(left, right) + c.data).astype(np.float32), tl.float32)

    plain_scaled = TritonSemantic.dot_scaled

    def dot_scaled(self, a, a_scale, a_form, b, b_scale, b_form, c, *rest):
        wrapped = (form if hasattr(form, "value") else tl.constexpr(form) for form in (a_form, b_form))
        flags = (flag.value if isinstance(flag, tl.constexpr) else flag for flag in rest)
        a_form, b_form = wrapped
        operands: tuple = (a, a_scale, a_form, b, b_scale, b_form, c)
        return plain_scaled(self, *operands, *flags)

    plain_dtype, dtypes = interpreter._get_np_dtype, {}

    def get_np_dtype(kind):
        element = kind.scalar.name
        if element not in dtypes:
            dtypes[element] = plain_dtype(kind)
        return dtypes[element]

    plain_patch_lang, patched = interpreter._patch_lang, set()

    def patch_lang(fn):
        languages = {lang for lang in (tl, tl.core) if any(value is lang for value in fn.__globals__.values())}
        if languages <= patched:  # a device function, in a launch that has patched them
            return None
        scope = plain_patch_lang(fn)
        restore = scope.restore

        def end():
            restore()
            patched.clear()

        scope.restore = end
        patched.update(languages)
        return scope

    plain_patch = interpreter._patch_lang_tensor

    def patch_tensor(tensor, *scope):
        result = plain_patch(tensor, *scope)
        tensor.__index__ = lambda self: int(np.asarray(self.handle.data).reshape(-1)[0])
        return result

    def create_fp_to_fp(self, value, kind, rounding):
        return cast(value, kind)

    def create_fma(self, x, y, z):
        exact = x.data.astype(np.float64) * y.data  # of two float32: fits
        result = (exact + z.data).astype(np.float32)
        return handle(np.where(np.isnan(result), np.float32(np.nan), result), z.dtype.scalar)

    def create_maxnumf(self, lhs, rhs):
        return self.binary_op(lhs, rhs, np.fmax)

    def create_minnumf(self, lhs, rhs):
        return self.binary_op(lhs, rhs, np.fmin)

    def create_inline_asm(self, text, constraints, values, kinds, pure, pack):
        dtypes = [interpreter._get_np_dtype(kind) for kind in kinds]
        outputs = run_asm(text, [value.data for value in values], dtypes, pack)
        results = [handle(output, kind.scalar) for output, kind in zip(outputs, kinds, strict=True)]
        return SimpleNamespace(get_result=results.__getitem__)

    casts = (cast_impl, create_fp_to_fp, create_inline_asm)
    sums = (create_fma, create_maxnumf, create_minnumf, create_dot, create_dot_scaled)
    for method in (*casts, binary_op, unary_op, *sums):
        setattr(builder, method.__name__, method)
    setattr(TritonSemantic, "dot_scaled", dot_scaled)  # noqa: B010  its signature is wider
    interpreter._patch_lang_tensor, interpreter._patch_lang = patch_tensor, patch_lang
    interpreter._get_np_dtype = get_np_dtype
