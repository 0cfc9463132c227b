"""The benchmark on a card: small layers, few readings."""

import pytest
import torch

from moe_ops.bench.cases import Case, Shape, layer_weights
from moe_ops.bench.compare import time_peer
from moe_ops.bench.layer import time_layer
from moe_ops.bench.peers import PEERS
from moe_ops.bench.timing import Effort, Rates

pytestmark = [
    pytest.mark.gpu("tests/test_bench.py"),
    pytest.mark.unpoisoned("poison would be in the times and in the peak of memory"),
]

SMALL = Shape("small", 8, 1024, 512, 2)
SHORT = Effort(warm_up=0.01, least=5, most=5)
RATES = Rates(4e12, 7e14, 1.4e15, 8.0)


def case(recipe: str, T: int) -> Case:
    return Case(SMALL, T, recipe, layer_weights(SMALL, recipe, torch.device("cuda")))


@pytest.mark.parametrize("T", [1, 16, 1000])
@pytest.mark.parametrize("recipe", ["fp8_block", "bf16"])
def test_row_has_every_column_and_keeps_to_its_plan(recipe, T):
    row = time_layer(case(recipe, T), "auto", "auto", RATES, SHORT, kernels=True)
    assert row.notes == () and row.kernels
    assert row.peak_mib is not None and 0 < row.peak_mib <= row.plan_mib
    assert None not in (row.burst_us, row.cold_us, row.triton_us)
    assert row.compared == min(T, 512)
    assert sum(kernel["us"] for kernel in row.kernels) < 2 * row.us


@pytest.mark.parametrize("kind", PEERS, ids=lambda kind: kind.name)
def test_peer_is_right_or_says_why_not(kind):
    one = case(kind.recipe, 16)
    row = time_peer(kind, one, SHORT)
    if row.reason is not None:
        pytest.skip(row.reason)
    assert row.error is not None and row.error < one.format.max_diff
