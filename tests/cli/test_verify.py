"""verify: holds here, and fails where a result is off."""

import pytest
import torch
from typer.testing import CliRunner

from moe_ops import verify as matrix
from moe_ops.cli.application import app
from moe_ops.recipes import RECIPES

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="says what a CPU prints")


def run(*arguments, code: int = 0) -> str:
    result = CliRunner().invoke(app, ["verify", *arguments], env={"COLUMNS": "80"})
    assert result.exit_code == code, result.output
    return result.stdout


def test_quick_holds_for_every_recipe():
    out = run("--quick")
    assert all(recipe in out for recipe in RECIPES) and "fails" not in out
    assert "63 of 63 cases hold." in out
    assert max(map(len, out.splitlines())) <= 80


def test_all_cases_of_one_recipe():
    outcomes = list(matrix.verify(recipes=("bf16",)))
    assert [o.layout for o in outcomes] == ["auto", "contiguous", "masked", "gathered", "direct"]
    assert all(o.holds and o.cases == len(matrix._CASES) and 0 < o.error <= o.bound for o in outcomes)


@pytest.mark.parametrize("factor", [1.05, float("nan")])
def test_a_wrong_result_fails(monkeypatch, factor):
    """The judge's result is changed: by five per cent, or to NaN."""
    judge = matrix.LayerCase.judge
    monkeypatch.setattr(matrix.LayerCase, "judge", lambda self, *a: judge(self, *a) * factor)
    out = run("--quick", "--recipe", "bf16", code=1)
    assert "fails" in out and "0 of 15 cases hold." in out


def test_a_call_that_raises_is_a_failure(monkeypatch):
    monkeypatch.setattr(matrix, "_pairs", lambda *_: iter([("contiguous", "deep_gemm")]))
    out = run("--quick", "--recipe", "bf16", code=1)
    assert "deep_gemm" in out and "0 of 3 cases hold." in out and "Traceback" not in out


def test_an_unknown_recipe_fails_in_words():
    result = CliRunner().invoke(app, ["verify", "--recipe", "int4"])
    assert result.exit_code == 2 and "recipe must be one of" in result.stderr
