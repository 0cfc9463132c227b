"""moe-ops simulate: what it prints, what it writes, and what it refuses."""

import json

import pytest
from typer.testing import CliRunner

from moe_ops.cli.application import app

SMALL = ["simulate", "-E", "32", "-K", "512", "-I", "256", "--top-k", "4", "--world", "16"]


def invoke(*arguments, code=0):
    result = CliRunner().invoke(app, [*SMALL, *map(str, arguments)], env={"COLUMNS": "150"})
    assert result.exit_code == code, result.output
    return result


def test_simulate_names_every_format_and_every_assumption():
    out = invoke("--routing", "zipf").stdout
    for name in ("standard", "flashinfer", "deepep_ll", "deepep_normal", "deepep_v2_expanded", "deepep_v2_masked"):
        assert name in out
    assert "slowest: rank " in out and "use: " in out and "times the mean" in out
    assert "450 GB/s" in out and "50 GB/s across, 10 us" in out and "NVIDIA H200" in out
    assert out == invoke("--routing", "zipf").stdout != invoke("--routing", "zipf", "--seed", 1).stdout


def test_simulate_json_and_chart_hold_the_same(tmp_path):
    path = tmp_path / "chart.png"
    answer = json.loads(invoke("--json", "--captured", "--chart", path).stdout)
    assert path.stat().st_size > 1000
    refused = {row["format"] for row in answer["formats"] if "refused" in row}
    assert refused == {"deepep_normal", "deepep_v2"}
    rows = [row for row in answer["formats"] if "refused" not in row]
    assert answer["use"]["format"] in {row["format"] for row in rows}
    for row in rows:
        parts = row["dispatch_us"]["max"] + row["gemm_us"]["max"] + row["combine_us"]["max"]
        assert row["us"] == pytest.approx(parts)
        assert row["memory_bytes"]["total"] == sum(row["memory_bytes"][n] for n in ("weights", "experts", "exchange"))
    assert len(answer["assumptions"]) >= 4


def test_simulate_takes_faster_links_for_less_time():
    slow, fast = (json.loads(invoke("--json", "--inter", rate).stdout)["formats"][0] for rate in (50, 100))
    assert fast["dispatch_us"]["max"] < slow["dispatch_us"]["max"] and fast["gemm_us"] == slow["gemm_us"]


def test_simulate_splits_experts_and_tokens():
    out = invoke("--moe-tp", 4, "--attn-tp", 2, "--tokens", 10).stdout
    assert "attn_dp=8 attn_tp=2 ep=4 moe_tp=4" in out
    assert "moe_tp must be 1 beside an all-to-all; got 4" in out and "use: standard over torch" in out


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--world", 2048], "world must be in [1, 1024]; got 2048"),
        (["--attn-tp", 3], "attn_tp must be a divisor of world=16; got 3"),
        (["--recipe", "mxfp8"], "recipe must be one that the table of times holds; got mxfp8"),
        (["--routing", "power"], "routing must be uniform, zipf or a file"),
        (["--inter", 0], "Links: inter must be positive; got 0"),
        (["--tokens", -1], "tokens must be at least 0; got -1"),
    ],
)
def test_simulate_explains_itself(arguments, words):
    result = invoke(*arguments, code=2)
    assert result.stdout == "" and words in result.stderr and result.stderr.count("\n") == 1
