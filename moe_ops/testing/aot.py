"""Compiles Triton kernels for cards that are not there, by the launchers that ship, and reads what ptxas says of them.

    with compiling("sm100") as kernels:
        launch(ops.TOPK, logits=torch.empty(8, 128, device="meta"), ...)
    assert kernels[0].spilled == 0

Nothing runs: tensors are on `meta`, and a driver that only knows an architecture stands in for the card's.
"""

import io
import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

import torch

from moe_ops.registry import Op

CAPABILITY = {"sm90": 90, "sm100": 100, "sm120": 120}
SHARED_LIMIT = {"sm90": 232448, "sm100": 232448, "sm120": 101376}
"""Bytes of shared memory that a program may use."""


@dataclass(frozen=True)
class Compiled:
    """One kernel as it would run."""

    name: str
    arch: str
    ptx: str
    registers: int
    """Of one thread."""
    spilled: int
    """Bytes stored to and loaded from local memory because registers ran out."""
    shared: int
    tensor_memory: int
    """Columns, on Blackwell."""
    warps: int
    warnings: tuple[str, ...]
    """Of ptxas; one says that wgmma had to be serialised."""
    cubin: bytes = field(repr=False)

    def __str__(self) -> str:
        sizes = f"{self.warps} warps, {self.registers} registers, {self.spilled} B spilled, {self.shared} B shared"
        return f"{self.name} on {self.arch}: {sizes}, {self.tensor_memory} columns of tensor memory"

    @property
    def products(self) -> set[str]:
        """The matrix instructions, by name and format."""
        pattern = r"(wgmma\.mma_async\S+|tcgen05\.mma\.\S+|(?<![\w.])mma\.sync\S+)"
        return set(re.findall(pattern, self.ptx))

    @property
    def instructions(self) -> list[tuple[int, str]]:
        """(address, text) of the machine code."""
        from triton import knobs

        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            Path(file.name).write_bytes(self.cubin)
            command = [knobs.nvidia.cuobjdump.path, "-sass", file.name]
            text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        lines = re.findall(r"^\s+/\*([0-9a-f]{4,})\*/\s+(.*?);", text, re.MULTILINE)
        return [(int(at, 16), line) for at, line in lines]

    def check(self, product: str | None = None) -> None:
        """Asserts what a kernel needs to run well: nothing spilled or serialised, within the card's limits.

        Args:
            product: a pattern that every matrix instruction matches, of which there must be one. None: there is none.
        """
        assert self.spilled == 0, f"{self}: registers ran out"
        assert not self.warnings, f"{self}: {self.warnings}"
        assert self.shared <= SHARED_LIMIT[self.arch], f"{self}: more shared memory than {SHARED_LIMIT[self.arch]}"
        assert self.tensor_memory <= 512 and self.registers * self.warps * 32 <= 65536, str(self)
        if product is None:
            assert not self.products, f"{self}: unexpected {self.products}"
        else:
            wrong = {found for found in self.products if not re.search(product, found)}
            assert self.products and not wrong, f"{self}: {wrong or 'no matrix instruction'} instead of {product}"


@contextmanager
def compiling(arch: str) -> Iterator[list[Compiled]]:
    """Within, launching a kernel compiles it for `arch` and appends the result to the list."""
    from triton import knobs
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    results: list[Compiled] = []
    run = JITFunction.run

    def compile_only(self, *args, grid, warmup, **kwargs):
        log = io.StringIO()
        with redirect_stdout(log):  # ptxas reports here, and Triton prints a failing kernel's whole PTX
            kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        if log.getvalue():
            setattr(kernel, "ptxas_log", log.getvalue())  # noqa: B010  a kernel that is compiled again says nothing
        results.append(_read(kernel, arch))

    with (
        mock.patch.object(driver, "_active", _driver(CAPABILITY[arch])),  # reset_active() would look for a card
        mock.patch.object(JITFunction, "run", compile_only),
        mock.patch.object(knobs.nvidia, "dump_ptxas_log", True),
        mock.patch("moe_ops.kernels.grouped_gemm.arch_of", lambda op, device: arch),
        mock.patch("moe_ops.kernels.gated_gemm.arch_of", lambda op, device: arch),
        mock.patch("moe_ops.kernels.pipelined.multiprocessors", lambda device: 132),
        mock.patch("moe_ops.arch.arch_of", lambda op, device: arch),
        mock.patch("moe_ops.kernels.launch.capability", lambda device: divmod(CAPABILITY[arch], 10)),
    ):
        yield results


def launch(op: Op, **arguments) -> None:
    """Calls the op's Triton launcher with results that its contract describes, on the device of its arguments."""
    specs = op.contract(backend="triton", **arguments)
    op.kernels["triton"](tuple(spec.empty("meta") for spec in specs), **arguments)


def _read(kernel, arch: str) -> Compiled:
    log, metadata = kernel.ptxas_log, kernel.metadata
    return Compiled(
        name=metadata.name,
        arch=arch,
        ptx=kernel.asm["ptx"],
        registers=max(map(int, re.findall(r"Used (\d+) registers", log))),
        spilled=sum(map(int, re.findall(r"(\d+) bytes spill", log))),
        shared=metadata.shared,
        tensor_memory=getattr(metadata, "tmem_size", 0) or 0,
        warps=metadata.num_warps,
        warnings=tuple(line for line in log.splitlines() if re.search("warning|serialized", line, re.IGNORECASE)),
        cubin=kernel.asm["cubin"],
    )


def _driver(capability: int):
    """A driver for a card of this capability that is asked for nothing but its target."""
    from triton.backends.compiler import GPUTarget
    from triton.backends.driver import DriverBase

    class Driver(DriverBase):
        @classmethod
        def is_active(cls):
            return False

        def get_current_target(self):
            return GPUTarget("cuda", capability, 32)

        def get_current_device(self):
            return capability  # JIT caches are per device: one for each architecture

        def get_current_stream(self, device):
            return 0

        def map_python_to_cpp_type(self, ty):
            return ty

        def get_active_torch_device(self):
            return torch.device("meta")

        def get_benchmarker(self):
            raise NotImplementedError("nothing runs here")

    return Driver()
