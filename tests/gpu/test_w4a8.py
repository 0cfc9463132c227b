"""The GEMMs over repacked MXFP4 weights on a Hopper card against float64: twice, with the same bits."""

import pytest
import torch

from moe_ops.arch import arch_of

pytest.importorskip("triton", reason="triton is not installed")
from moe_ops.testing.w4a8_cases import CASES, LARGE  # noqa: E402

pytestmark = pytest.mark.gpu("tests/interp/test_w4a8.py")
if torch.cuda.is_available() and arch_of("tests", "cuda") != "sm90":
    pytest.skip("the kernels of w4a8.py are for sm_90", allow_module_level=True)

GATED = 1e-2
"""Relative error of the quantised activation: a code that flips is 6 % of its value."""
SLACK = 2.0**-10
"""Of the sum of absolute products: the tensor core cuts off bits of what it adds over 128 columns."""


@pytest.mark.parametrize("case", [*CASES, *LARGE], ids=str)
def test_gated_gemm(case):
    case.check_gated("cuda", GATED)


@pytest.mark.parametrize("case", [*CASES, *LARGE], ids=str)
def test_grouped_gemm(case):
    case.check_down("cuda", SLACK)


@pytest.mark.parametrize("case", CASES[:3], ids=str)
def test_dependent_launches(case):
    case.check_gated("cuda", GATED)
    case.check_down("cuda", SLACK)
