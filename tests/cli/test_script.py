"""The installed script, and what happens without the extra."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(sys.executable).with_name("moe-ops")


def test_script_works_in_a_pipe():
    if not SCRIPT.exists():
        pytest.skip("the package is not installed in this environment")
    done = subprocess.run(
        [SCRIPT, "plan", "-E", "8", "-K", "256", "-I", "128", "--top-k", "2", "--arch", "sm90"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout and done.stdout.splitlines()[-1].startswith("total ")
    failed = subprocess.run([SCRIPT, "plan"], capture_output=True, text=True)
    assert failed.returncode == 2 and failed.stderr.startswith("error: plan: E must be") and not failed.stdout


@pytest.mark.parametrize("module", ["typer", "rich"])
def test_without_the_extra_it_says_which_pip_command(module):
    code = f"import sys; sys.modules[{module!r}] = None; from moe_ops.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr == "moe-ops: typer and rich are not installed. pip install 'fused-moe-ops[cli]'\n"


def test_the_package_imports_neither_typer_nor_rich():
    code = "import sys, moe_ops; print([m for m in ('typer', 'rich') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr
