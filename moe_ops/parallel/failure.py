"""failing_together: an error on one rank ends the others with an error that names it.

A rank that raises leaves its peers in a collective that cannot finish. They do not wait for ever: its exit closes their
connections, and otherwise the group's timeout ends them. But what they see then says nothing of the cause. So the rank
leaves a note in the job's store, and its peers read it when their collective fails. No failure, no cost.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

_SECONDS = 2.0  # how long a peer's note may take to arrive after its connection was lost
_BROKEN = "The group cannot be used any more: start all ranks again."


class PeerError(RuntimeError):
    """Another rank failed; `rank` says which."""

    def __init__(self, rank: int, note: str, here: int, seen: str):
        self.rank = rank
        first = seen.strip().split("\n")[0].split(". ")[0]  # what follows is advice that the note makes needless
        super().__init__(f"rank {rank} failed: {note} Rank {here} was waiting for it ({first}). {_BROKEN}")


@contextmanager
def failing_together(seconds: float = _SECONDS) -> Iterator[None]:
    """Around the calls that ranks make in step, outside of any compiled or captured part.

    Give the process group a timeout that a step never takes (init_process_group(timeout=...)): it bounds the wait for a
    rank that raised and lives on. NCCL ends the process at that point; its own log then names the collective.

    Args:
        seconds: how long a failed collective waits for another rank's note before it is taken for the cause.

    Raises:
        PeerError: this rank's collective failed because of another rank's error. Any other exception is this rank's
        own, as it was raised, with a note of the rank.
    """
    try:
        yield
    except Exception as error:
        here = dist.get_rank()
        store = dist.distributed_c10d._get_default_store()
        cause = _note_of_a_peer(store, here, seconds if _from_a_collective(error) else 0.0)
        if cause is not None:
            raise PeerError(*cause, here, str(error)) from error
        _leave(store, here, error)
        error.add_note(f"on rank {here} of {dist.get_world_size()}. {_BROKEN}")
        raise


def _from_a_collective(error: Exception) -> bool:
    text = str(error)
    return isinstance(error, dist.DistError) or any(word in text for word in ("gloo", "NCCL", "Connection"))


def _key(rank: int) -> str:
    return f"moe_ops/failed/{rank}"


def _leave(store: dist.Store, here: int, error: Exception) -> None:
    try:
        store.set(_key(here), f"{type(error).__name__}: {error}")
    except dist.DistError:  # the store is gone with the process that held it
        pass


def _note_of_a_peer(store: dist.Store, here: int, seconds: float) -> tuple[int, str] | None:
    deadline = time.monotonic() + seconds
    peers = [rank for rank in range(dist.get_world_size()) if rank != here]
    while True:
        try:
            for rank in peers:
                if store.check([_key(rank)]):
                    return rank, store.get(_key(rank)).decode()
        except dist.DistError:
            return None
        if time.monotonic() >= deadline:
            return None
        time.sleep(0.05)
