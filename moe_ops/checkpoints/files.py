"""Files: the safetensors files of a checkpoint, checked by their headers before a byte of a tensor is read."""

import json
import os
import struct
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from moe_ops import check

DTYPES = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I32": torch.int32,
    "I64": torch.int64,
}
INDEX = "model.safetensors.index.json"

# Pages of a mapped file count as resident until the file is closed, so it is opened anew after this many bytes.
_MAPPED = 16 << 20


@dataclass(frozen=True)
class Entry:
    """One tensor, as a file's header describes it."""

    dtype: str
    shape: tuple[int, ...]


class Files:
    """Names, headers and slices of a checkpoint.

    Args:
        op: who asks, for error sentences.
        path: a directory with config.json and safetensors files (with or without an index), or one safetensors file
            beside its config.json.

    Raises:
        FileNotFoundError: no such path. ImportError: safetensors is not installed.
    """

    def __init__(self, op: str, path: str | os.PathLike):
        try:
            import safetensors
        except ImportError:
            raise ImportError(f"{op}: safetensors is not installed. pip install 'fused-moe-ops[checkpoints]'") from None
        self._open, self._broken = safetensors.safe_open, safetensors.SafetensorError
        self.op, path = op, Path(path)
        if not path.exists():
            raise FileNotFoundError(
                check.sentence(op, "path", "a checkpoint", f"{path}, which is not there", "Check it.")
            )
        self.root = path if path.is_dir() else path.parent
        self._headers: dict[str, dict[str, Entry]] = {}
        self._handles: dict = {}
        self._touched = 0
        self.where = self._names(None if path.is_dir() else path.name)

    def json(self, name: str) -> dict:
        """A JSON file of the directory; ValueError where it is missing or no object."""
        file = self.root / name
        check.value(file.is_file(), self.op, name, f"in {self.root}", "no such file", "Copy it from the model.")
        try:
            content = json.loads(file.read_text())
        except ValueError as error:
            content = error
        if isinstance(content, dict):
            return content
        raise ValueError(check.sentence(self.op, name, "a JSON object", content, "Download it again."))

    def _names(self, single: str | None) -> dict[str, str]:
        """Tensor name -> file name."""
        if single is None and (self.root / INDEX).is_file():
            weight_map = self.json(INDEX).get("weight_map")
            if isinstance(weight_map, dict):
                return weight_map
            rule = "an object with a weight_map, tensor name to file"
            raise ValueError(check.sentence(self.op, INDEX, rule, "none", "Download it again."))
        files = [single] if single else sorted(file.name for file in self.root.glob("*.safetensors"))
        fix = "Pass a directory of safetensors files."
        check.value(bool(files), self.op, "path", "a directory with *.safetensors files", self.root, fix)
        return {name: file for file in files for name in self.header(file)}

    def header(self, file: str) -> dict[str, Entry]:
        """The tensors of a file. Its length is checked, so that a truncated one is named before anything is read."""
        if file in self._headers:
            return self._headers[file]
        path, again = self.root / file, "Download it again."
        check.value(path.is_file(), self.op, file, f"in {self.root}", "no such file", again)
        size = path.stat().st_size
        with open(path, "rb") as stream:
            length = struct.unpack("<Q", stream.read(8).ljust(8, b"\0"))[0]
            rule = f"a whole safetensors file, its header {length} bytes long"
            check.value(0 < length <= size - 8, self.op, file, rule, f"{size} bytes", again)
            try:
                raw = json.loads(stream.read(length))
                raw.pop("__metadata__", None)
                entries = {name: Entry(e["dtype"], tuple(e["shape"])) for name, e in raw.items()}
                ends = {name: 8 + length + int(e["data_offsets"][1]) for name, e in raw.items()}
            except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
                got = f"one that cannot be read ({type(error).__name__}: {error})"
                raise ValueError(check.sentence(self.op, file, "a file with a header", got, again)) from None
        for name, end in sorted(ends.items(), key=lambda item: item[1]):
            rule = f"whole in {file}: {entries[name].dtype} {entries[name].shape}, up to byte {end}"
            got = f"a file of {size} bytes"
            check.value(end <= size, self.op, name, rule, got, f"It is truncated. {again}")
        self._headers[file] = entries
        return entries

    def expect(self, name: str, shapes: tuple[tuple[int, ...], ...], dtypes: tuple[torch.dtype, ...]) -> None:
        """ValueError or TypeError unless the tensor is there with one of these shapes and dtypes."""
        letters = " or ".join(map(str, shapes))
        fix = "The checkpoint is incomplete."
        check.value(name in self.where, self.op, name, f"in the checkpoint, of shape {letters}", "no such tensor", fix)
        file = self.where[name]
        entry = self.header(file).get(name)
        if entry is None:
            check.value(False, self.op, name, f"in {file}, as the index says", "no such tensor", "Download it again.")
            return
        fix = "config.json describes another model, or the file is damaged."
        check.value(entry.shape in shapes, self.op, f"{name} in {file}", f"of shape {letters}", entry.shape, fix)
        allowed = [short for short, dtype in DTYPES.items() if dtype in dtypes]
        if entry.dtype not in allowed:
            raise TypeError(check.sentence(self.op, f"{name} in {file}", " or ".join(allowed), entry.dtype, fix))

    def get(self, name: str, *index: int | slice) -> Tensor:
        """A slice of a tensor: a view of the mapped file, for the caller to copy or use up at once."""
        file = self.where[name]
        if self._touched > _MAPPED:
            self.close()
        if file not in self._handles:
            try:
                self._handles[file] = self._open(self.root / file, framework="pt")
            except self._broken as error:
                raise ValueError(
                    check.sentence(self.op, file, "a safetensors file", error, "Download it again.")
                ) from error
        handle = self._handles[file]
        tensor = handle.get_slice(name)[index] if index else handle.get_tensor(name)
        self._touched += tensor.nbytes
        return tensor

    def close(self) -> None:
        """Drops the mappings."""
        self._handles.clear()
        self._touched = 0

    def __enter__(self) -> "Files":
        return self

    def __exit__(self, *_) -> None:
        self.close()
