"""Training and held-back text: the source of the standard library of the running interpreter.

Every machine that can run the example has this text, so nothing is downloaded. The exact bytes
follow the interpreter's version; the split between training and held-back files does not.
"""

from __future__ import annotations

import sysconfig
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

HELD_BACK = (
    "argparse.py",
    "configparser.py",
    "dataclasses.py",
    "fractions.py",
    "heapq.py",
    "json/decoder.py",
    "shutil.py",
    "textwrap.py",
)

# Tests, installed packages and generated tables (character maps, help topics, build settings)
# read unlike the code in the held-back modules, or are not part of every installation.
EXCLUDED_FOLDERS = frozenset(
    {
        "site-packages",
        "dist-packages",
        "test",
        "tests",
        "idlelib",
        "turtledemo",
        "lib2to3",
        "encodings",
        "pydoc_data",
        "ensurepip",
        "__pycache__",
    }
)
EXCLUDED_PREFIXES = ("_sysconfigdata", "config-")


def _is_source(relative: Path) -> bool:
    if EXCLUDED_FOLDERS.intersection(relative.parts):
        return False
    return not any(part.startswith(EXCLUDED_PREFIXES) for part in relative.parts)


def _as_bytes(files: list[Path]) -> Tensor:
    text = b"\n".join(file.read_bytes() for file in files)
    return torch.from_numpy(np.frombuffer(text, dtype=np.uint8).copy())


def train_bytes() -> Tensor:
    """All training source in sorted path order: (bytes,) uint8."""
    root = Path(sysconfig.get_path("stdlib"))
    held_back = set(HELD_BACK)
    relative = sorted((path.relative_to(root) for path in root.rglob("*.py")), key=lambda path: path.as_posix())
    return _as_bytes([root / path for path in relative if _is_source(path) and path.as_posix() not in held_back])


def held_back_bytes() -> Tensor:
    """The held-back modules that this interpreter has, in order of name: (bytes,) uint8."""
    root = Path(sysconfig.get_path("stdlib"))
    return _as_bytes([root / name for name in HELD_BACK if (root / name).is_file()])


def held_back_chunks(count: int = 64, length: int = 256) -> Tensor:
    """`count` evenly spaced windows of the held-back text: (count, length + 1) int64.

    Columns `[:-1]` are the inputs and `[1:]` the targets, so each window scores `length` bytes.
    Even spacing makes a small sample touch every held-back module.
    """
    text = held_back_bytes()
    starts = torch.linspace(0, text.numel() - length - 1, count, dtype=torch.float64).long()
    return text[starts[:, None] + torch.arange(length + 1)].long()
