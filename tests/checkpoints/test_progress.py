"""The bar, with and without its package."""

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
