"""Every op's kernel against the CPU reference, on results full of NaN."""

import pytest

from moe_ops.testing.kernel_cases import CASES
from moe_ops.testing.kernel_check import check_kernel


@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernel_matches_reference(case):
    check_kernel(case)
