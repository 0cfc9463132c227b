"""A rank that raises ends the others, with an error that names it."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
EXAMPLE = str(ROOT / "examples" / "05_expert_parallel.py")

LIVES_ON = """
import os, sys, time, torch, torch.distributed as dist
from datetime import timedelta
from moe_ops.dispatch.collectives import Collectives
from moe_ops.parallel import failing_together
rank = int(sys.argv[1])
limit = timedelta(seconds=2)
dist.init_process_group("gloo", init_method=sys.argv[2], rank=rank, world_size=2, timeout=limit)
ranks = Collectives()
ranks.all_reduce(torch.ones(1))
try:
    with failing_together():
        if rank == 1:
            raise ValueError("no page left.")
        ranks.all_reduce(torch.ones(1))
except Exception as error:
    print(type(error).__name__, error, *getattr(error, "__notes__", []), flush=True)
if rank == 1:
    time.sleep(5)
os._exit(0)
"""


def run(*command, timeout=90):
    return subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=timeout, cwd=ROOT)


def test_failure_of_a_rank_that_lives_on(tmp_path):
    """The others wait for the group's timeout, not for ever."""
    arguments = ["-c", LIVES_ON]
    where = (tmp_path / "rendezvous").as_uri()
    started = time.monotonic()
    ranks = [
        subprocess.Popen([sys.executable, *arguments, str(rank), where], stdout=subprocess.PIPE, text=True, cwd=ROOT)
        for rank in range(2)
    ]
    waiting, _ = ranks[0].communicate(timeout=60)
    waited = time.monotonic() - started
    raised, _ = ranks[1].communicate(timeout=60)
    assert waiting.startswith("PeerError rank 1 failed: ValueError: no page left. Rank 0 was waiting for it (")
    assert waiting.strip().endswith("The group cannot be used any more: start all ranks again.")
    assert raised.startswith("ValueError no page left. on rank 1 of 2.")
    assert waited < time.monotonic() - started, "rank 0 ended first, while rank 1 still lived"


def test_failure_of_a_rank_that_ends():
    done = run(EXAMPLE, "--fail", "1")
    assert done.returncode == 1
    assert "rank 1: ValueError: sequence 7 has no page in the cache. on rank 1 of 2." in done.stderr
    assert "rank 0: PeerError: rank 1 failed: ValueError: sequence 7 has no page in the cache." in done.stderr


def test_example_runs_by_itself():
    done = run(EXAMPLE)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len([line for line in done.stdout.splitlines() if line.startswith("step")]) == 12
    assert "step 3, rank 1: 0 tokens" in done.stdout


@pytest.mark.slow
def test_example_runs_under_torchrun():
    """Every rank without a token from step 5 on; weights in fp4, counts on the host."""
    command = ("-m", "torch.distributed.run", "--nproc-per-node", "2", EXAMPLE, "--recipe", "mxfp4")
    done = run(*command, "--format", "deepep_normal")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "step 5, rank 0: 0 tokens" in done.stdout
