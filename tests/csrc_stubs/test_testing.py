"""The comparisons offered to other tests."""

import pytest
import torch

from moe_ops.csrc_stubs.deep_gemm import testing


def test_calc_diff():
    x = torch.randn(64)
    assert testing.calc_diff(x, x) == pytest.approx(0, abs=1e-15)
    assert testing.calc_diff(x, -x) == pytest.approx(2)
    assert testing.calc_diff(x, torch.zeros(64)) == 1
    assert testing.calc_diff(torch.zeros(3), torch.zeros(3)) == 0


def test_count_bytes():
    x = torch.zeros(3, dtype=torch.bfloat16)
    assert testing.count_bytes(x, None, (x, [x.double()])) == 6 + 6 + 24


def test_assert_bitwise_equal(refuses):
    x = torch.tensor([[1.0, float("nan")], [0.0, 2.0]])
    testing.assert_bitwise_equal(x, x.clone())
    y = x.clone()
    y[1, 0] = -0.0
    with refuses(
        "bitwise mismatch of out: 1 of 4 elements, first at 2 of the flattened tensor:",
        "0.0 against -0.0",
        kind=AssertionError,
    ):
        testing.assert_bitwise_equal(x, y, "out")
    with refuses(
        "bitwise mismatch: torch.float32 (2, 2) against torch.float64 (2, 2)",
        kind=AssertionError,
    ):
        testing.assert_bitwise_equal(x, x.double())
