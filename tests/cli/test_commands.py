"""Each command on a CPU: what it prints, what it writes, and how it fails."""

import json
import re

import pytest
import torch
from typer.testing import CliRunner

import moe_ops
from moe_ops.cli import plan as plan_command
from moe_ops.cli.application import app
from moe_ops.plan_text import table
from moe_ops.recipes import RECIPES

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="says what a CPU prints")
COMMANDS = ("doctor", "plan", "demo", "bench", "warmup", "convert", "trace", "simulate", "verify")
SMALL = ["-E", "8", "-K", "256", "-I", "128", "--top-k", "2"]


def invoke(*arguments, code: int = 0, **env):
    result = CliRunner().invoke(app, [str(a) for a in arguments], env={"COLUMNS": "80", **env})
    assert result.exit_code == code, result.output
    return result


def fails_in_words(*arguments, **env) -> str:
    """One line on stderr, and no traceback."""
    result = invoke(*arguments, code=2, **env)
    assert result.stdout == "" and result.stderr.count("\n") == 1, result.output
    assert result.stderr.startswith("error: ")
    return result.stderr


def test_every_command_is_tested_here():
    assert set(COMMANDS) == {command.name for command in app.registered_commands}


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_an_example_and_fits_80_columns(command):
    out = invoke(command, "--help").stdout
    assert f"Example: moe-ops {command}" in out
    assert max(map(len, out.splitlines())) <= 80


def test_debug_gives_the_traceback():
    arguments = ["plan", *SMALL, "--layout", "psum"]
    assert "layout must be one of auto" in fails_in_words(*arguments)
    with pytest.raises(ValueError, match="layout must be one of auto"):
        CliRunner().invoke(app, ["--debug", *arguments], catch_exceptions=False)


def test_what_is_not_ours_is_named_by_its_type(monkeypatch):
    def broken(**_):
        raise KeyError("[x]")

    monkeypatch.setattr(plan_command.moe_ops, "plan", broken)
    assert fails_in_words("plan", *SMALL) == "error: KeyError: '[x]'\n"


def test_plan_prints_the_plan():
    out = invoke("plan", *SMALL, "-T", 37, "--recipe", "mxfp8", "--arch", "sm90").stdout
    plan = moe_ops.plan(T=37, E=8, K=256, I=128, top_k=2, recipe="mxfp8", num_experts=8, arch="sm90")
    assert out == f"{plan}\n"


def test_plan_takes_the_scales_of_the_arch():
    layer = json.loads(invoke("plan", *SMALL, "--arch", "sm100", "--json").stdout)["layer"]
    assert layer["scale_format"] == "ue8m0"


def test_plan_json_is_the_plan():
    got = json.loads(invoke("plan", *SMALL, "-T", 64, "--json").stdout)
    plan = moe_ops.plan(T=64, E=8, K=256, I=128, top_k=2, recipe="fp8_block")
    assert got["total_bytes"] == plan.total_bytes and got["workspace_bytes"] == plan.workspace_bytes
    assert [(b["name"], b["offset"], b["bytes"]) for b in got["buffers"]] == [
        (b.name, b.offset, b.nbytes) for b in plan.buffers
    ]


CONFIGS = {
    "qwen3_moe": ({"num_experts": 128, "hidden_size": 2048, "moe_intermediate_size": 768}, (128, 2048, 768)),
    "deepseek_v3": (
        {"n_routed_experts": 256, "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048},
        (256, 7168, 2048),
    ),
    "gpt_oss": ({"num_local_experts": 32, "hidden_size": 2880, "intermediate_size": 2880}, (32, 2944, 2944)),
}


@pytest.mark.parametrize("nested", [False, True], ids=["", "text_config"])
@pytest.mark.parametrize("model_type", CONFIGS)
def test_plan_reads_a_models_config(tmp_path, model_type, nested):
    keys, sizes = CONFIGS[model_type]
    config = {"model_type": model_type, "num_experts_per_tok": 4, **keys}
    (tmp_path / "config.json").write_text(json.dumps({"text_config": config} if nested else config))
    result = invoke("plan", "--config", tmp_path, "--world", 2, "--json")
    layer = json.loads(result.stdout)["layer"]
    assert (layer["num_experts"], layer["K"], layer["I"]) == sizes
    assert (layer["E"], layer["top_k"]) == (sizes[0] // 2, 4)
    assert ("K=2880 is padded to 2944" in result.stderr) == (model_type == "gpt_oss")


def test_plan_agrees_with_what_transformers_writes(tmp_path):
    transformers = pytest.importorskip("transformers", reason="needs transformers (pip install 'fused-moe-ops[hf]')")
    for config, experts in (
        (transformers.Qwen3MoeConfig(), "num_experts"),
        (transformers.DeepseekV3Config(), "n_routed_experts"),
        (transformers.GptOssConfig(), "num_local_experts"),
    ):
        config.save_pretrained(tmp_path)
        layer = json.loads(invoke("plan", "--config", tmp_path, "--json").stdout)["layer"]
        assert (layer["E"], layer["top_k"]) == (getattr(config, experts), config.num_experts_per_tok)


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_plan_draws(tmp_path, suffix):
    pytest.importorskip("matplotlib", reason="the chart is the extra `plot`")
    file = tmp_path / f"plan.{suffix}"
    invoke("plan", *SMALL, "--chart", file)
    assert file.stat().st_size > 1000


@pytest.mark.parametrize("width", [40, 80, 100])
def test_plan_leaves_out_columns_of_a_narrow_terminal(width):
    plan = moe_ops.plan(T=4096, E=32, K=7168, I=2048, top_k=8, recipe="fp8_block")
    lines = table(plan, width).splitlines()[1:-1]
    assert max(map(len, lines)) <= max(width, 47)
    assert len(lines) == len(plan.buffers) + 1 and "MiB" in lines[0]


@pytest.mark.parametrize(
    "arguments, said",
    [
        ([], "E must be a positive integer; got None. Pass --config, or all of --experts,"),
        ([*SMALL, "--recipe", "int4"], "recipe must be one of bf16, fp8_block, mxfp8, mxfp4; got 'int4'."),
        ([*SMALL, "--world", "3"], "world must be a divisor of the 8 experts; got 3."),
        ([*SMALL, "-T", "-1"], "T must be an integer >= 0; got -1."),
        ([*SMALL, "--arch", "sm80"], "arch must be one of cpu, sm90, sm100, sm120; got 'sm80'."),
        (["--config", "/nowhere"], "config must be a file of JSON; got /nowhere, FileNotFoundError."),
        ([*SMALL, "--chart", "/nowhere/plan.png"], "No such file or directory"),
    ],
)
def test_plan_fails_in_words(arguments, said):
    result = invoke("plan", *arguments, code=2)
    assert said in result.stderr and "Traceback" not in result.stderr


def test_plan_refuses_a_model_without_experts(tmp_path):
    (tmp_path / "config.json").write_text('{"hidden_size": 64, "intermediate_size": 128}')
    assert "config must be one with num_experts or" in fails_in_words("plan", "--config", tmp_path)
    (tmp_path / "config.json").write_text("[]")
    assert "config must be a JSON object; got list" in fails_in_words("plan", "--config", tmp_path)


def test_demo_shows_each_recipe():
    out = invoke("demo").stdout
    for recipe in RECIPES:
        assert re.search(rf"{recipe} .* 1 .*as eager", out), out
    assert "wrong" not in out


def test_demo_fails_where_a_recipe_is_off(monkeypatch):
    monkeypatch.setattr("moe_ops.cli.demo._through", lambda *_: (2, 0.001, True, 1))
    assert "wrong" in invoke("demo", code=1).stdout


def test_demo_fails_in_words_without_the_compiler():
    assert "nosuch" in invoke("demo", "--compiler", "nosuch", code=2).stderr


def test_bench_forwards_its_arguments(monkeypatch):
    seen = []
    monkeypatch.setattr("moe_ops.bench.__main__.main", lambda arguments: seen.append(arguments) or 1)
    invoke("bench", "--shape", "tiny", "--quick", code=1)
    invoke("bench", "--", "--recipe", "bf16", code=1)
    assert seen == [["--shape", "tiny", "--quick"], ["--recipe", "bf16"]]


def test_bench_decode_forwards_its_arguments(monkeypatch):
    seen = []
    monkeypatch.setattr("moe_ops.bench.decode.main", lambda arguments: seen.append(arguments) or 1)
    invoke("bench", "decode", code=1)
    invoke("bench", "decode", "--small", "--batch", "2", code=1)
    invoke("bench", "decode", "--", "--small", code=1)
    invoke("bench", "--", "decode", "--small", code=1)
    assert seen == [[], ["--small", "--batch", "2"], ["--small"], ["--small"]]


def test_bench_refuses_what_it_does_not_know():
    assert "Traceback" not in invoke("bench", "--", "--shape", "huge", code=2).stderr


def test_warmup_does_it_once(tmp_path):
    pytest.importorskip("filelock", reason="warmup needs filelock")
    arguments = ["warmup", *SMALL, "-T", 1, "-T", 8]
    first = invoke(*arguments, MOE_OPS_CACHE_DIR=str(tmp_path)).stdout
    again = invoke(*arguments, MOE_OPS_CACHE_DIR=str(tmp_path)).stdout
    assert re.match(r"[1-9]\d* kinds of calls run, 0 found done, on cpu\.", first), first
    assert again.startswith("0 kinds of calls run")
    assert "tokens must be counts of at least 1" in fails_in_words("warmup", *SMALL, "-T", 0)


def test_trace_names_the_stages(tmp_path):
    file = tmp_path / "trace.json"
    out = invoke("trace", file, "-T", 5, "--recipe", "bf16").stdout
    names = {event.get("name") for event in json.loads(file.read_text())["traceEvents"]}
    for op in ("topk", "pre_permute_ws", "gated_gemm_ws", "silu_and_quant_ws", "grouped_gemm_ws", "post_permute_ws"):
        assert f"moe::{op}" in names and f"moe::{op}" in out
    shares = [int(share) for share in re.findall(r"(\d+)%", out)]
    assert 95 <= sum(shares) <= 105


def test_trace_fails_in_words(tmp_path):
    assert "in a folder that exists" in fails_in_words("trace", tmp_path / "none" / "trace.json")
    assert "tokens must be at least 0" in fails_in_words("trace", tmp_path / "t.json", "-T", -1)
    assert "backend" in fails_in_words("trace", tmp_path / "t.json", "--backend", "deep_gemm")


def test_convert_fails_in_words(tmp_path):
    assert "path must be a directory with *.safetensors" in fails_in_words("convert", tmp_path, tmp_path / "to")
    said = fails_in_words("convert", tmp_path, tmp_path / "to", "--layers", "3-x")
    assert said == "error: convert: layers must be numbers and ranges; got '3-x'. Write them like 3-5,8.\n"
