"""Every example has a main(), says what to do on a GPU, and runs on a CPU.

Where the others run: 01 in test_docs.py, 05 in parallel/test_failure.py, 06 in
integrations/test_transformers_models.py.
"""

import ast
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("[0-9]*.py"))


def load(number):
    return runpy.run_path(str(next(path for path in EXAMPLES if path.name.startswith(number))))


def test_examples_are_numbered_from_1_to_7():
    assert [path.name[:3] for path in EXAMPLES] == [f"0{number}_" for number in range(1, 8)]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_example_has_a_main_and_a_word_on_gpus(path):
    tree = ast.parse(path.read_text())
    assert "main" in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    told = ast.get_docstring(tree)
    assert f"python examples/{path.name}" in told
    assert any(word in told for word in ("GPU", "card")), "it must say what to change for a GPU"


@pytest.mark.unpoisoned(reason="export would trace the poison")
def test_example_02_one_graph_and_an_exported_model(capsys):
    load("02")["main"](["--backend", "aot_eager"])
    said = capsys.readouterr().out
    assert said.count("1 graph for") == 2 and "saved and loaded" in said


def test_example_03_decodes_in_fixed_memory(capsys):
    load("03")["main"]()
    assert capsys.readouterr().out.count("differs from the plain model") == 4


def test_example_04_loads_shards_and_converts(capsys):
    load("04")["main"]([])
    said = capsys.readouterr().out
    assert "two ranks' sums differ from the whole" in said and "the same bits" in said


def test_example_04_prepares_for_another_card(capsys):
    load("04")["main"](["--arch", "sm100"])
    assert "fp8_block ue8m0" in capsys.readouterr().out


def test_example_07_adds_a_format():
    command = [sys.executable, "examples/07_new_dispatcher.py"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("from the float32 sum") == 4 and done.stdout.count("1 graph") == 2
