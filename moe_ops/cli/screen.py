"""Where the commands print: made at each call, so that a redirected stream is followed."""

from rich import box
from rich.console import Console
from rich.table import Table


def stdout() -> Console:
    return Console(highlight=False)


def stderr() -> Console:
    return Console(stderr=True, highlight=False)


def table(title: str, *columns: str, right: tuple[str, ...] = ()) -> Table:
    """A table that folds long cells instead of cutting them."""
    made = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", pad_edge=False)
    for name in columns:
        made.add_column(name, justify="right" if name in right else "left", overflow="fold")
    return made
