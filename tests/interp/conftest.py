"""The Triton kernels in Triton's interpreter, in a process of its own: TRITON_INTERPRET=1 python -m pytest tests/interp

The variable counts at the moment when triton is imported, and an interpreted process cannot compile.
"""

import os
import sys

import numpy as np
import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    raise pytest.UsageError(
        "tests/interp must run in a process started with TRITON_INTERPRET=1; got none. Run tests/test_interpreter.py, "
        "which starts one, or set the variable yourself."
    )
assert "triton" not in sys.modules or sys.modules["triton"].knobs.runtime.interpret

from moe_ops.testing import interpreter, poisoned_memory  # noqa: E402

torch.set_num_threads(1)
interpreter.install()


@pytest.fixture(autouse=True)
def _seeded_and_poisoned():
    """numpy warns where a card is silent: exp overflows, NaN compares."""
    torch.manual_seed(0)
    with poisoned_memory(), np.errstate(all="ignore"):
        yield
