"""RankPool: processes that form a gloo group and stay, so that many distributed tests pay for one start."""

import atexit
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from functools import lru_cache
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from moe_ops.testing.poison import poisoned_memory


class RankPool:
    """`max(sizes)` ranks on this machine's CPUs. After a call that fails they start anew: a rank that raised has left
    the others waiting in a collective.

    Args:
        sizes: the numbers of ranks that calls may ask for; each gets a group of the first ranks.
        seconds: how long a call, and each of its collectives, may take.
    """

    def __init__(self, sizes: tuple[int, ...], seconds: float = 60.0):
        self._sizes, self._seconds = sizes, seconds
        self._start()

    def run(self, size: int, function: Callable, *arguments: Any, **named: Any) -> list[Any]:
        """[function(group, *arguments, **named) of each of `size` ranks], of a module that the ranks can import.

        Raises:
            RuntimeError: a rank raised; with its traceback. TimeoutError: a rank did not answer.
        """
        for pipe in self._pipes[:size]:
            pipe.send((size, function, arguments, named))
        waiting = {pipe: rank for rank, pipe in enumerate(self._pipes[:size])}
        results: list[Any] = [None] * size
        wrong, deadline = [], time.monotonic() + self._seconds
        while waiting and time.monotonic() < deadline:
            for pipe in wait(list(waiting), timeout=deadline - time.monotonic()):
                rank = waiting.pop(pipe)  # type: ignore[call-overload]
                failed, results[rank] = self._pipes[rank].recv()
                if failed:
                    wrong.append(f"rank {rank} of {size}:\n{results[rank]}")
                    deadline = min(deadline, time.monotonic() + 1)  # its peers may raise the same, or wait for ever
        if wrong or waiting:
            self.close()
            self._start()
        if wrong:
            raise RuntimeError("\n".join(wrong))
        if waiting:
            silent = ", ".join(map(str, waiting.values()))
            raise TimeoutError(f"RankPool: every rank must answer within {self._seconds} s; got nothing from {silent}.")
        return results

    def close(self) -> None:
        """Ends the ranks; those that are stuck in a collective after a second."""
        for pipe in self._pipes:
            pipe.send(None)
        deadline = time.monotonic() + 1
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
            process.kill()
            process.join()
        self._folder.cleanup()

    def _start(self) -> None:
        context = mp.get_context("spawn")
        self._folder = tempfile.TemporaryDirectory()
        rendezvous = Path(self._folder.name, "rendezvous").as_uri()
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(max(self._sizes)):
            here, there = context.Pipe()
            arguments = (rank, self._sizes, rendezvous, self._seconds, there)
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            self._pipes.append(here)
            self._processes.append(process)


@lru_cache(maxsize=1)
def shared_pool() -> RankPool:
    """Four ranks, and groups of one and two of them, for all tests of this process; ended with it."""
    pool = RankPool((1, 2, 4))
    atexit.register(pool.close)
    return pool


def _serve(rank: int, sizes: tuple[int, ...], rendezvous: str, seconds: float, pipe: Connection) -> None:
    torch.set_num_threads(1)
    world = max(sizes)
    limit = timedelta(seconds=seconds)
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=world, timeout=limit)
    groups = {size: dist.new_group(list(range(size)), timeout=limit) for size in sizes}
    while (order := pipe.recv()) is not None:
        size, function, arguments, named = order
        try:
            with torch.no_grad(), poisoned_memory():
                pipe.send((False, function(groups[size], *arguments, **named)))
        except Exception:
            pipe.send((True, traceback.format_exc()))
