"""A progress bar where rich is installed and a person watches; nothing otherwise."""

import sys
from collections.abc import Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")


def track(items: Iterable[T], total: int, description: str, wanted: bool) -> Iterator[T]:
    """The items, counted on stderr while they are taken."""
    if wanted and sys.stderr.isatty():
        try:
            from rich.console import Console
            from rich.progress import track as rich_track
        except ImportError:
            pass
        else:
            yield from rich_track(items, description, total=total, console=Console(stderr=True), transient=True)
            return
    yield from items
