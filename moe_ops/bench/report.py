"""What a run found: a line a row on the screen, and one JSON file that is whole after every row."""

import datetime
import importlib.metadata
import json
import os
import platform
import subprocess
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

import moe_ops
from moe_ops.bench.compare import PeerRow
from moe_ops.bench.layer import Row
from moe_ops.bench.timing import Rates

_DISTRIBUTIONS = ("triton", "sgl-deep-gemm", "transformers")
_SHOWN_KERNELS = 12


@dataclass
class Report:
    """Rows as they come; the head says where they were measured."""

    head: dict[str, Any]
    rates: Rates | None
    path: str | None
    say: Callable[[str], Any]
    results: list[dict] = field(default_factory=list)
    peers: list[dict] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    """This package's own rows that are wrong or do not run."""
    notes: list[str] = field(default_factory=list)

    @classmethod
    def of_this_machine(cls, rates: Rates | None, path: str | None, say: Callable[[str], Any]) -> "Report":
        cuda = torch.cuda.is_available()
        processor = f"{platform.machine()} CPU, {torch.get_num_threads()} threads"
        head = dict(
            card=torch.cuda.get_device_name() if cuda else processor,
            date=datetime.date.today().isoformat(),
            moe_ops=moe_ops.__version__,
            torch=torch.__version__,
            **{name: _version(name) for name in _DISTRIBUTIONS},
            driver=_driver() if cuda else None,
        )
        report = cls(head, rates, path, say)
        say(" | ".join(f"{name} {value}" for name, value in head.items() if value is not None))
        if rates is not None:
            say(
                f"measured here: copy {rates.copy / 1e12:.2f} TB/s, products: bf16 {rates.bf16 / 1e12:.0f}, "
                f"fp8 {rates.fp8 / 1e12:.0f} TFLOP/s; a replay of one tiny kernel {rates.replay_us:.1f} us"
            )
        say(_HEAD)
        return report

    def add(self, row: Row) -> None:
        self.results.append(row.asdict())
        self.say(line(row))
        for kernel in row.kernels[:_SHOWN_KERNELS]:
            self.say(f"{'':8}{kernel['us']:9.1f} us {kernel['calls']:4} x  {kernel['name'][:90]}")
        self.write()

    def add_peer(self, row: PeerRow) -> None:
        self.peers.append(row.asdict())
        head = f"  {row.peer:26} {row.shape:16} {row.T:6} {row.recipe:14}"
        if row.us is None:
            self.say(f"{head} -  {row.reason}")
        else:
            what = "" if row.whole else "  its GEMMs alone"
            times = f"{row.us:9.1f} [{row.p20:.1f}, {row.p80:.1f}] {_us(row.burst_us):>9}"
            self.say(f"{head} {times}  error {row.error:.4f}{what}")
        self.write()

    def fail(self, what: str) -> None:
        self.failures.append(what)
        self.say(f"FAILED {what}")
        self.write()

    def note(self, what: str) -> None:
        self.notes.append(what)
        self.say(what)
        self.write()

    def asdict(self) -> dict[str, Any]:
        rates = None if self.rates is None else asdict(self.rates)
        found = dict(results=self.results, peers=self.peers, failures=self.failures, notes=self.notes)
        return self.head | dict(rates=rates) | found

    def write(self) -> None:
        """In one step, so that a run that is killed leaves the rows it had."""
        if self.path is None:
            return
        with open(f"{self.path}.part", "w") as file:
            json.dump(self.asdict(), file, indent=1)
        os.replace(f"{self.path}.part", self.path)


_HEAD = (
    f"{'shape':16} {'T':>6} {'recipe':14} {'routing':10} {'layout':11} {'backend':10} {'us':>9} {'[p20, p80]':>18} "
    f"{'burst':>9} {'cold':>9} {'triton':>9} {'floor':>8} {'share':>5} {'error':>7}  MiB"
)


def line(row: Row) -> str:
    """One row as it is printed."""
    head = f"{row.shape:16} {row.T:6} {row.recipe:14} {row.routing:10} {row.layout:11} {row.backend:10}"
    share = "-" if row.floor_us is None else f"{row.floor_us / row.us:.0%}"
    spread = f"[{row.p20:.1f}, {row.p80:.1f}]"
    times = " ".join(f"{_us(time):>9}" for time in (row.burst_us, row.cold_us, row.triton_us))
    columns = f"{times} {_us(row.floor_us):>8} {share:>5} {row.error:7.4f}"
    memory = f"{row.plan_mib:.1f}" if row.peak_mib is None else f"{row.peak_mib:.1f} of {row.plan_mib:.1f}"
    more = "" if row.equal_work is None else f"  {row.equal_work:.2f} x uniform at equal work"
    notes = "".join(f"\n{'':8}{note}" for note in row.notes)
    return f"{head} {row.us:9.1f} {spread:>18} {columns}  {memory}{more}{notes}"


def _us(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _driver() -> str | None:
    """The driver's version, where its tool is there to tell."""
    ask = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(ask, capture_output=True, text=True, timeout=20, check=True).stdout.split()
    except (OSError, subprocess.SubprocessError):
        return None
    return answer[0] if answer else None
