"""doctor: healthy on a CPU, and a problem with its remedy for each thing that can be wrong."""

import json
from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

from moe_ops import doctor
from moe_ops.cli.application import app
from moe_ops.recipes import RECIPES
from moe_ops.rows import LAYOUTS

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a plain CPU is described")
H200 = "GPU 0: NVIDIA H200"


@pytest.fixture(autouse=True)
def plain(monkeypatch, tmp_path):
    """No card, no switches, a cache folder of the test's own."""
    for name in doctor.env.SWITCHES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MOE_OPS_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(doctor, "_nvidia_smi", lambda *_: [])


def run(*arguments, code: int = 0) -> str:
    result = CliRunner().invoke(app, ["doctor", *arguments], env={"COLUMNS": "80"})
    assert result.exit_code == code, result.output
    return result.stdout


def commands() -> list[str]:
    return [problem.command for problem in doctor.examine().problems]


def test_a_plain_cpu_is_healthy():
    out = run()
    assert "Nothing is wrong. There is no card: the reference runs everything" in " ".join(out.split())
    assert max(map(len, out.splitlines())) <= 80


def test_json_says_the_same():
    report = json.loads(run("--json"))
    assert report["healthy"] and report["arch"] == "cpu" and report["cards"] == []
    assert report["versions"]["torch"] == torch.__version__
    assert report["switches"].keys() == {"MOE_OPS_CACHE_DIR"}
    assert {(r["recipe"], r["layout"]) for r in report["routes"]} == {(r, x) for r in RECIPES for x in LAYOUTS[1:]}
    assert {r["backend"] for r in report["routes"]} == {"reference", None}


def test_routes_say_what_runs():
    """Of each route, a call with the layout by name runs exactly where a backend is named."""
    from moe_ops.testing import LayerCase

    for route in doctor.examine().routes:
        case = LayerCase(route.recipe, route.scale_format, T=3)
        inputs, weights = case.build()
        if route.backend is None:
            with pytest.raises(ValueError, match="layout must be"):
                case.run(inputs, weights, layout=route.layout)
        else:
            case.run(inputs, weights, layout=route.layout, backend=route.backend)


@pytest.mark.parametrize("value", ["triton", "nosuch"])
def test_a_forced_backend_is_wrong(monkeypatch, value):
    monkeypatch.setenv("MOE_OPS_BACKEND", value)
    assert commands() == ["unset MOE_OPS_BACKEND"]
    out = run(code=1)
    assert f"MOE_OPS_BACKEND={value}" in out and "unset MOE_OPS_BACKEND" in out
    assert json.loads(run("--json", code=1))["healthy"] is False


def test_a_forced_backend_that_is_the_right_one_is_fine(monkeypatch):
    monkeypatch.setenv("MOE_OPS_BACKEND", "reference")
    assert commands() == []


def test_torch_without_cuda_on_a_machine_with_a_card(monkeypatch):
    monkeypatch.setattr(doctor, "_nvidia_smi", lambda *_: [H200])
    monkeypatch.setattr(torch.version, "cuda", None)
    (command,) = commands()
    assert command.endswith("-m pip install --force-reinstall torch")
    assert "H200" in run(code=1)


def test_a_card_that_torch_cannot_use(monkeypatch):
    monkeypatch.setattr(doctor, "_nvidia_smi", lambda *_: [H200])
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    (command,) = commands()
    assert "torch.cuda.init()" in command


def test_a_cache_folder_that_cannot_be_made(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MOE_OPS_CACHE_DIR", str(tmp_path / "file" / "below"))
    assert commands() == ["export MOE_OPS_CACHE_DIR=/tmp/moe_ops"]


@pytest.mark.parametrize(
    "torch_version, installed, command",
    [
        ("2.11.0", None, "pip install 'sgl-deep-gemm>=0.1.0,<=0.1.4.post1'"),
        ("2.13.1+cu130", "0.1.4", "pip install 'sgl-deep-gemm>=0.1.5,<=0.2.2'"),
        ("2.12.0", None, "pip install 'fused-moe-ops[cuda]'"),
        ("2.12.0", "0.1.4", "export MOE_OPS_BACKEND=triton"),
    ],
)
def test_deep_gemm_missing_on_a_card(monkeypatch, torch_version, installed, command):
    routes = [replace(route, backend="triton", expected="deep_gemm") for route in doctor.examine().routes]
    monkeypatch.setattr(torch, "__version__", torch_version)
    monkeypatch.setattr(doctor, "_version", lambda name: installed)
    problems = doctor._backend_problems(routes, torch.device("cpu"))
    assert [problem.command for problem in problems] == [command]


def test_triton_missing_on_a_card(monkeypatch):
    monkeypatch.setattr(doctor, "_missing", lambda module: "ImportError: no triton")
    (problem,) = doctor._backend_problems([], torch.device("cuda"))
    assert problem.command == "pip install 'fused-moe-ops[triton]'"
