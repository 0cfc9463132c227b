"""The benchmark: checks before it times, and writes what it printed."""

import json

import pytest
import torch

from moe_ops.bench.__main__ import main
from moe_ops.bench.layer import SHAPES, time_layer
from moe_ops.prep import prepare_weights


@pytest.mark.skipif(torch.cuda.is_available(), reason="times the card's shapes there: make bench")
def test_bench_writes_what_it_measured(tmp_path, capsys):
    main(["--recipe", "fp8_block", "--tokens", "1", "8", "--json", str(tmp_path / "out.json")])
    report = json.loads((tmp_path / "out.json").read_text())
    assert [row["T"] for row in report["results"]] == [1, 8]
    assert all(
        row["us"] > 0 and row["error"] == 0 and row["p20"] <= row["us"] <= row["p80"] for row in report["results"]
    )
    assert "fp8_block" in capsys.readouterr().out


def test_bench_refuses_to_time_a_wrong_layer(monkeypatch):
    from moe_ops.bench import layer

    tiny = SHAPES[-1]
    w13, w2 = torch.randn(tiny.E, 2 * tiny.I, tiny.K), torch.randn(tiny.E, tiny.K, tiny.I)
    right = layer.fused_deepgemm
    wrong = lambda *a, backend, **k: right(*a, backend="reference", **k) * (1 if backend == "reference" else 1.2)  # noqa: E731
    monkeypatch.setattr(layer, "fused_deepgemm", wrong)
    with pytest.raises(AssertionError, match=r"bench: tiny T=4 bf16 auto: error 0.200 above 0.01"):
        time_layer(tiny, 4, prepare_weights(w13, w2, recipe="bf16"), "auto", "auto", None)
