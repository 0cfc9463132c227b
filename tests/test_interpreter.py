"""Runs tests/interp: the Triton kernels in Triton's interpreter, in a process of its own."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=os.environ | environment, timeout=550)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.parametrize("file", sorted(path.name for path in (ROOT / "tests" / "interp").glob("test_*.py")))
def test_kernels_in_the_interpreter(file):
    done = run(f"tests/interp/{file}", TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout


def test_the_folder_refuses_to_run_without_the_variable():
    done = run("tests/interp", TRITON_INTERPRET="0")
    assert done.returncode != 0
    assert "tests/interp must run in a process started with TRITON_INTERPRET=1" in done.stderr + done.stdout
