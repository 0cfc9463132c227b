"""The shim itself: what a card computes, case by case, where the stock interpreter does not."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from moe_ops.testing import assert_bits_equal
from moe_ops.testing.decode import decode_e2m1


@triton.jit
def _cast_kernel(x_ptr, out_ptr, N, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + place, mask=place < N, other=0.0)
    tl.store(out_ptr + place, x.to(out_ptr.dtype.element_ty), mask=place < N)


@triton.jit
def _product_kernel(a_ptr, b_ptr, out_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    square = i[:, None] * N + i[None, :]
    tl.store(out_ptr + square, tl.dot(tl.load(a_ptr + square), tl.load(b_ptr + square)))


@triton.jit
def _scaled_product_kernel(a_ptr, a_scale_ptr, b_ptr, b_scale_ptr, out_ptr, N: tl.constexpr, SWAP: tl.constexpr):
    """(N, 64) e4m3 times the transpose of (N, 64) e2m1, or the other way round."""
    i = tl.arange(0, N)[:, None]
    a = tl.load(a_ptr + i * 64 + tl.arange(0, 64)[None, :])
    b = tl.load(b_ptr + i * 32 + tl.arange(0, 32)[None, :])
    a_scale = tl.load(a_scale_ptr + i * 2 + tl.arange(0, 2)[None, :])
    b_scale = tl.load(b_scale_ptr + i * 2 + tl.arange(0, 2)[None, :])
    zero = tl.zeros((N, N), tl.float32)
    if SWAP:
        out = tl.dot_scaled(b, b_scale, "e2m1", a.T, a_scale, "e4m3", zero)
    else:
        out = tl.dot_scaled(a, a_scale, "e4m3", b.T, b_scale, "e2m1", zero)
    tl.store(out_ptr + i * N + tl.arange(0, N)[None, :], out)


@triton.jit
def _not_a_number_kernel(x_ptr, out_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    x = tl.load(x_ptr + i)
    tl.store(out_ptr + i, tl.maximum(x, 2.0))
    tl.store(out_ptr + N + i, tl.minimum(x, 2.0))
    tl.store(out_ptr + 2 * N + i, tl.maximum(x, 2.0, propagate_nan=tl.PropagateNan.ALL))
    tl.store(out_ptr + 3 * N + i, tl.fma(x, 0.0, x))


@triton.jit
def _add_kernel(x_ptr):
    x = tl.load(x_ptr + tl.arange(0, 16))
    tl.store(x_ptr + tl.arange(0, 16), x + x)


def cast(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    out = torch.zeros(x.shape, dtype=dtype)
    _cast_kernel[(triton.cdiv(x.numel(), 4096),)](x, out, x.numel(), BLOCK=4096)
    return out


def every_bf16() -> torch.Tensor:
    return torch.arange(-(2**15), 2**15).short().view(torch.bfloat16)


def hard_floats() -> torch.Tensor:
    """Around every step of e4m3 and bf16 in reach: the steps, the halfway points and their neighbours."""
    steps = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    middle = (steps[1:] + steps[:-1]) / 2
    near = torch.cat((steps, middle, torch.linspace(-3, 3, 999), torch.tensor([447.0, 464.0, 465.0, 1e4, 3e38])))
    near = torch.cat((near, torch.nextafter(near, torch.tensor(9e9)), torch.nextafter(near, torch.tensor(-9e9))))
    return torch.cat((near, -near, torch.tensor([float("inf"), -float("inf"), float("nan")])))


def test_bf16_reads_exactly():
    assert_bits_equal(cast(every_bf16(), torch.float32), every_bf16().float())


def test_nan_loses_to_a_number_and_has_no_sign():
    nan, inf = float("nan"), float("inf")
    out = torch.zeros(4, 4)
    _not_a_number_kernel[(1,)](torch.tensor([nan, 1.0, inf, -inf]), out, 4)
    assert_bits_equal(out[0], torch.tensor([2.0, 2.0, inf, 2.0]))
    assert_bits_equal(out[1], torch.tensor([2.0, 1.0, 2.0, -inf]))
    assert_bits_equal(out[2], torch.tensor([nan, 2.0, inf, 2.0]))
    assert_bits_equal(out[3], torch.tensor([nan, 1.0, nan, nan]))


def test_bf16_rounds_to_nearest_even():
    assert_bits_equal(cast(hard_floats(), torch.bfloat16), hard_floats().bfloat16())


@pytest.mark.parametrize("values", [hard_floats, every_bf16])
def test_e4m3_rounds_to_nearest_even_and_saturates(values):
    x = values().float()
    finite = torch.where(x.isnan(), x, x.clamp(-448, 448))
    got, want = cast(x, torch.float8_e4m3fn), finite.to(torch.float8_e4m3fn)
    assert_bits_equal(got[~x.isnan()], want[~x.isnan()])
    assert got[x.isnan()].float().isnan().all()


def test_e4m3_reads_exactly():
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    got = cast(codes, torch.float32)
    assert torch.equal(got.isnan(), codes.float().isnan()) and torch.equal(got.nan_to_num(), codes.float().nan_to_num())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn], ids=lambda d: str(d)[6:])
def test_products_are_those_of_the_values(dtype):
    a, b = (torch.randn(32, 32).to(dtype) for _ in range(2))
    out = torch.empty(32, 32)
    _product_kernel[(1,)](a, b, out, N=32)
    torch.testing.assert_close(out.double(), a.double() @ b.double(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("swap", [False, True], ids=["rows", "swapped"])
def test_scaled_products_follow_the_format(swap):
    a, b = torch.randn(16, 64).to(torch.float8_e4m3fn), torch.randint(0, 256, (16, 32), dtype=torch.uint8)
    a_scale, b_scale = (torch.randint(120, 130, (16, 2), dtype=torch.uint8) for _ in range(2))
    out = torch.empty(16, 16)
    _scaled_product_kernel[(1,)](a, a_scale, b, b_scale, out, N=16, SWAP=swap)
    factors = [torch.exp2(scale.double() - 127).repeat_interleave(32, 1) for scale in (a_scale, b_scale)]
    want = (a.double() * factors[0]) @ (decode_e2m1(b) * factors[1]).T
    torch.testing.assert_close(out.double(), want.T if swap else want, rtol=1e-5, atol=1e-5)


def test_arithmetic_in_bf16_is_refused():
    with pytest.raises(Exception, match="arithmetic in bf16: convert to float32 first"):
        _add_kernel[(1,)](torch.ones(16).bfloat16())


def test_numpy_has_the_shapes_that_were_asked_for():
    """An encoder that flattened would go unnoticed in one-dimensional kernels."""
    from moe_ops.testing.interpreter import decode, encode

    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    assert (decode(encode(x, "bf16"), "bf16") == x).all() and (decode(encode(x, "fp8e4nv"), "fp8e4nv") == x).all()
