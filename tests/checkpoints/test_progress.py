"""The bar and the command line where their packages are missing."""

import importlib
import io
import sys

import pytest

from moe_ops.checkpoints.progress import track


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("rich", [True, False])
@pytest.mark.parametrize("terminal", [True, False])
def test_progress_never_changes_the_items(monkeypatch, rich, terminal):
    stream = Terminal() if terminal else io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    if not rich:
        for name in ("rich.console", "rich.progress"):
            monkeypatch.setitem(sys.modules, name, None)
    assert list(track(range(5), 5, "layer 0", wanted=True)) == list(range(5))
    assert (stream.getvalue() != "") == (rich and terminal)
    assert list(track(range(5), 5, "layer 0", wanted=False)) == list(range(5))


def test_command_line_names_its_extra(monkeypatch):
    monkeypatch.delitem(sys.modules, "moe_ops.cli", raising=False)
    monkeypatch.setitem(sys.modules, "typer", None)
    with pytest.raises(ImportError) as caught:
        importlib.import_module("moe_ops.cli")
    assert str(caught.value) == "moe-ops: typer and rich are not installed. pip install 'fused-moe-ops[cli]'"
