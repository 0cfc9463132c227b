"""The decoding benchmark, on one row: it checks, times, and refuses what is wrong."""

import json

import pytest
import torch

from moe_ops.bench import decode
from moe_ops.bench.cases import layer_weights
from moe_ops.bench.decoder import MODELS, SMALL, Decoder
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
    assert 0 < row.error <= 1e-2 and row.kept_mib is None and row.peak_mib is None


def test_bench_decode_does_not_time_a_wrong_layer(weights, monkeypatch):
    monkeypatch.setattr("moe_ops.MoELayer.forward", lambda self, x: x)
    with pytest.raises(AssertionError, match="error .* of the MoE above"):
        decode._row(SMALL, "moe_ops", "bf16", weights, judged(weights), "eager", 2, CPU, ONCE)


def test_bench_decode_says_why_a_peer_does_not_run(weights):
    with pytest.raises(RuntimeError, match="deep_gemm needs a CUDA card"):
        decode._row(SMALL, "deepgemm", "fp8_block", weights, judged(weights), "compiled", 2, CPU, ONCE)


@pytest.mark.parametrize("sizes", MODELS.values(), ids=MODELS)
def test_bench_decode_models_take_a_step(sizes):
    meta = torch.device("meta")
    x = torch.empty(2, sizes.shape.K, dtype=torch.bfloat16, device=meta)
    model = Decoder(sizes, 2, [torch.nn.Identity() for _ in range(sizes.layers)], meta)
    assert model(x, torch.empty(1, dtype=torch.int64, device=meta)).shape == x.shape


def test_bench_decode_chooses_rows():
    wanted = decode.Rows(batches=(1, 8), experts=("moe_ops", "grouped_mm"), modes=("graph", "compiled"))
    card = [("moe_ops", "graph"), ("moe_ops", "compiled"), ("grouped_mm", "compiled")]
    assert wanted.of("bf16", torch.device("cuda")) == [(*way, batch) for way in card for batch in (1, 8)]
    assert wanted.of("fp8_block", CPU) == [("moe_ops", "compiled", 1), ("moe_ops", "compiled", 8)]
    assert decode.Rows(experts=("deepgemm",)).of("bf16", CPU) == []


@pytest.mark.parametrize(
    "arguments, said",
    [
        ("--small --mode graph", "no such row on cpu: graphs need a card"),
        ("--small --experts deepgemm --recipe bf16", "compiled alone, and of grouped_mm bf16, deepgemm fp8_block"),
        ("--small --model qwen3-30b-a3b", "leave out --model"),
    ],
)
def test_bench_decode_refuses_what_has_no_row(arguments, said, capsys):
    with pytest.raises(SystemExit) as stop:
        decode.main(arguments.split())
    assert stop.value.code == 2 and said in capsys.readouterr().err


def test_bench_decode_begins_no_row_after_its_time(tmp_path, monkeypatch):
    monkeypatch.setattr(decode, "layer_weights", None)  # nor builds anything
    path = tmp_path / "found.json"
    arguments = ["--small", "--mode", "eager", "--recipe", "bf16", "--time-limit", "0", "--json", str(path)]
    assert decode.main(arguments) == 0
    found = json.loads(path.read_text())
    assert found["rows"] == [] and found["sizes"]["tiny"]["layers"] == SMALL.layers
    assert found["missing"] == ["tiny moe_ops bf16 eager batch 4: not begun within 0 s"]
