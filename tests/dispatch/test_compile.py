"""fullgraph compile of the formats without host counts, on two ranks with different numbers of tokens."""

import pytest

from moe_ops.dispatch import FORMATS
from moe_ops.testing.dispatch_cases import DispatchCase, run_compiled

CAPTURED = [name for name, form in FORMATS.items() if not form.needs_host_counts]


@pytest.mark.parametrize("name", CAPTURED)
def test_one_graph_for_every_token_count(ranks, name):
    """From a full batch down, with eager's bits."""
    case = DispatchCase(name, "fp8_block", (8, 7))
    assert ranks.run(2, run_compiled, case, "aot_eager") == [(1, [True] * 3)] * 2


@pytest.mark.slow
def test_inductor_keeps_the_bits(ranks):
    case = DispatchCase("deepep_ll", "mxfp4", (8, 7))
    assert ranks.run(2, run_compiled, case, "inductor") == [(1, [True] * 3)] * 2
