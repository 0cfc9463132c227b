"""The documents: Python blocks run, in order, in one namespace; printed tables are what the code prints."""

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import moe_ops

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_docs_readme_examples_run(capsys):
    namespace: dict = {}
    blocks = re.findall(r"```python\n(.*?)```", README, re.S)
    assert len(blocks) >= 2
    for block in blocks:
        exec(compile(block, "README.md", "exec"), namespace)
    assert namespace["out"].shape == (37, 256)
    assert "total" in capsys.readouterr().out


def test_docs_readme_plan_is_what_the_code_prints():
    printed = str(moe_ops.plan(T=4096, E=32, K=7168, I=2048, top_k=8, recipe="fp8_block"))
    assert printed.split("\n", 1)[1] in README


def test_docs_links_resolve():
    for document in ROOT.glob("*.md"):
        for target in re.findall(r"\]\((?!http)([^)#]+)", document.read_text()):
            assert (ROOT / target).exists(), f"{document.name} links to {target}"


@pytest.mark.slow
def test_docs_demo_runs_and_checks_itself():
    done = subprocess.run([sys.executable, "examples/01_tiny_moe_lm.py"], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "All checks hold." in done.stdout


def test_docs_demo_model_is_reproducible_in_form(monkeypatch):
    """The committed checkpoint is small, and holds what train.py writes."""
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    path = ROOT / "examples" / "tiny_moe_lm" / "tiny_moe_lm.safetensors"
    assert path.stat().st_size <= 4 << 20
    train = runpy.run_path(str(ROOT / "examples" / "tiny_moe_lm" / "train.py"), run_name="train")
    assert callable(train["main"])
