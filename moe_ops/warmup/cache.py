"""The manifest: which jobs were compiled on this machine, with these versions, for this card."""

import hashlib
import importlib.metadata
import json
import logging
import os
import stat
from collections.abc import Iterable
from pathlib import Path

import torch

from moe_ops import arch, check, env

_LOG = logging.getLogger("moe_ops")
_PACKAGES = ("fused-moe-ops", "torch", "triton", "sgl-deep-gemm")


def versions(device: torch.device | str) -> dict[str, str]:
    """What compiled code depends on: packages, card, and where the compilers keep it."""
    found = {name: _version(name) for name in _PACKAGES}
    card = arch.arch_of("warmup", device)
    if torch.device(device).type == "cuda":
        card = f"sm{''.join(map(str, arch.capability(torch.device(device))))} {torch.version.cuda}"
    return {**found, "card": card, **{name: str(path) for name, path in env.compile_caches().items()}}


def private(folder: Path) -> Path:
    """The folder, made 0700. What lies there says which code need not be compiled, so it must be the user's alone.

    Raises:
        PermissionError: it belongs to somebody else.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not hasattr(os, "getuid"):
        return folder
    facts = folder.stat()
    if facts.st_uid != os.getuid():
        rule, fix = f"the user's own (uid {os.getuid()})", "Set MOE_OPS_CACHE_DIR to a folder of yours."
        raise PermissionError(check.sentence("warmup", f"the cache folder {folder}", rule, f"uid {facts.st_uid}", fix))
    if stat.S_IMODE(facts.st_mode) & 0o077:
        folder.chmod(0o700)
    return folder


class Manifest:
    """Digests of the jobs that are compiled. Read and written under the lock of `warmup`.

    An entry that is cut short, of another version, changed by hand, or whose compiled code is gone counts as absent.
    """

    def __init__(self, folder: Path, made_with: dict[str, str]):
        self._made_with = made_with
        digest = hashlib.sha256(json.dumps(made_with, sort_keys=True).encode()).hexdigest()[:16]
        self.path = folder / f"{digest}.json"

    def read(self) -> set[str]:
        """The digests; empty, with a warning in the log, if the file is not what this version wrote."""
        try:
            text = self.path.read_text()
        except FileNotFoundError:
            return set()
        reason = self._why_not(text)
        if reason is None:
            return set(json.loads(text)["jobs"])
        _LOG.warning("warmup: %s is not used and is written anew: %s", self.path, reason)
        return set()

    def write(self, jobs: Iterable[str]) -> None:
        """Replaces the file in one step: a reader never sees half of it."""
        content = dict(made_with=self._made_with, jobs=sorted(jobs), kernels=_entries())
        half = self.path.with_suffix(f".{os.getpid()}")
        half.write_text(json.dumps({**content, "checksum": _checksum(content)}, indent=1))
        half.chmod(0o600)
        half.replace(self.path)

    def _why_not(self, text: str) -> str | None:
        if hasattr(os, "getuid") and self.path.stat().st_uid != os.getuid():
            return "it belongs to another user"
        try:
            content = json.loads(text)
            checksum = content.pop("checksum")
            if content["made_with"] != self._made_with:
                return "it was made with other versions"
            if checksum != _checksum(content):
                return "its checksum is wrong"
            if _entries() < content["kernels"]:
                return "compiled kernels that it knew of are gone"
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            return f"it cannot be read ({type(error).__name__}: {error})"
        return None


def _entries() -> int:
    """Files and folders in the compilers' caches."""
    return sum(1 for folder in env.compile_caches().values() for _ in folder.rglob("*"))


def _checksum(content: dict) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "missing"
