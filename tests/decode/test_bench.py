"""The decoding benchmark, on one row: it checks, times, and refuses what is wrong."""

import pytest
import torch

from moe_ops.bench import decode
from moe_ops.bench.cases import layer_weights
from moe_ops.bench.decoder import SMALL
from moe_ops.bench.timing import Effort

CPU = torch.device("cpu")
ONCE = Effort(warm_up=0.0, least=1, most=1)


@pytest.fixture(scope="module")
def weights():
    return [layer_weights(SMALL.shape, "bf16", CPU) for _ in range(SMALL.layers)]


def judged(weights):
    return decode._Judged(SMALL, weights[0], CPU)


def test_bench_decode_times_a_step(weights):
    row = decode._row(SMALL, "moe_ops", "bf16", weights, judged(weights), "eager", 2, CPU, ONCE)
    assert row.tokens_per_s == pytest.approx(2e6 / row.us)
    assert 0 < row.error <= 1e-2 and row.peak_mib is None


def test_bench_decode_does_not_time_a_wrong_layer(weights, monkeypatch):
    monkeypatch.setattr("moe_ops.MoELayer.forward", lambda self, x: x)
    with pytest.raises(AssertionError, match="error .* of the MoE above"):
        decode._row(SMALL, "moe_ops", "bf16", weights, judged(weights), "eager", 2, CPU, ONCE)


def test_bench_decode_says_why_a_peer_does_not_run(weights):
    with pytest.raises(RuntimeError, match="deep_gemm needs a CUDA card"):
        decode._row(SMALL, "deepgemm", "fp8_block", weights, judged(weights), "compiled", 2, CPU, ONCE)
