"""Expert-parallel decode: every rank has sequences of its own and some of the experts.

    python examples/05_expert_parallel.py                                # two processes on this CPU
    torchrun --nproc-per-node 2 examples/05_expert_parallel.py           # the same; with GPUs, NCCL and one card a rank
    python examples/05_expert_parallel.py --fail 1                       # rank 1 raises; rank 0 says so, and ends

Sequences end at different times, so ranks hold different numbers of tokens, at last none, and stay in step all the
same. Each step is checked against the whole layer, which every rank of this small example can also compute by itself.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import moe_ops
from moe_ops.dispatch import FORMATS, Experts
from moe_ops.parallel import ParallelMoE, ParallelSizes, failing_together, split_experts
from moe_ops.recipes import RECIPES

E, K, I, TOP_K, STEPS, MAX_TOKENS = 16, 512, 256, 4, 6, 8
SECONDS = 20  # of a collective that a rank never joins


def router(hidden_states: torch.Tensor, token_ids: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """The same on every rank: the first E columns are the logits."""
    return moe_ops.topk(hidden_states[:, :E].float(), TOP_K, scoring="sigmoid")


def sequences_left(rank: int, step: int) -> int:
    """Rank r starts with 5 + r sequences; some end at every step, and none is left before the last one."""
    return max(0, min(MAX_TOKENS, 5 + rank) - step * (rank + 1))


def decode(rank: int, world: int, device: torch.device, arguments: argparse.Namespace) -> None:
    """STEPS steps of one rank. Raises if a step differs from the whole layer."""
    generator = torch.Generator().manual_seed(0)
    w13 = torch.randn(E, 2 * I, K, generator=generator) / K**0.5
    w2 = torch.randn(E, K, I, generator=generator) / I**0.5
    whole = moe_ops.prepare_weights(w13.to(device), w2.to(device), recipe=arguments.recipe)
    layer = ParallelMoE(
        router,
        Experts(split_experts(whole, rank, world)),
        ParallelSizes(attn_dp=world, ep=world),
        top_k=TOP_K,
        dispatch=arguments.format,
        max_tokens=MAX_TOKENS,
        routed_scaling_factor=2.5,
        captured=arguments.compile,
    )
    step_of = torch.compile(layer, fullgraph=True, dynamic=True) if arguments.compile else layer
    if rank == 0:
        print(f"{world} ranks on {device.type}: {layer.extra_repr()}")
    x = torch.randn(sequences_left(rank, 0), K, generator=generator).bfloat16().to(device)
    for step in range(STEPS):
        x = x[: sequences_left(rank, step)]
        if rank == arguments.fail and step == 2:
            raise ValueError("sequence 7 has no page in the cache.")
        out = step_of(x)
        alone = Experts(whole).on_tokens(x, *router(x, None), routed_scaling_factor=2.5)
        error = float((out - alone).float().norm() / alone.float().norm().clamp(min=1e-9))
        if not error < RECIPES[arguments.recipe].max_diff:
            raise AssertionError(f"step {step}: relative difference {error} from the whole layer")
        line = f"step {step}, rank {rank}: {len(x)} tokens, {error:.0e} from one rank with all experts"
        print(line + "\n", end="", flush=True)  # ranks share the terminal: one write a line
        x = torch.nn.functional.rms_norm(x + out, (K,))


def run_rank(arguments: argparse.Namespace) -> None:
    """One process, started by torchrun or by `spawned`: RANK and WORLD_SIZE are set."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    cuda = torch.cuda.is_available() and torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", world))
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", rank))) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)  # ranks share the cores
    limit = timedelta(seconds=SECONDS)
    where = arguments.rendezvous or "env://"
    dist.init_process_group("nccl" if cuda else "gloo", init_method=where, rank=rank, world_size=world, timeout=limit)
    try:
        with torch.no_grad(), failing_together():
            decode(rank, world, device, arguments)
    except Exception as error:
        notes = " ".join(getattr(error, "__notes__", []))
        print(f"rank {rank}: {type(error).__name__}: {error} {notes}".rstrip(), file=sys.stderr, flush=True)
        os._exit(1)  # at once: taking the group down in order would wait for the others
    dist.destroy_process_group()


def spawned(rank: int, world: int, arguments: argparse.Namespace) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world))
    run_rank(arguments)


def main(argv: list[str] | None = None) -> int:
    """Runs this rank under torchrun; otherwise starts two, and returns 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    exchanging = [name for name, form in FORMATS.items() if form.reduces]
    parser.add_argument("--format", choices=exchanging, default="deepep_ll", help="dispatch format")
    parser.add_argument("--recipe", choices=list(RECIPES), default="fp8_block")
    parser.add_argument("--ranks", type=int, default=2, help="processes to start, without torchrun")
    parser.add_argument("--compile", action="store_true", help="one fullgraph compile for all steps")
    parser.add_argument("--fail", type=int, default=None, metavar="RANK", help="let this rank raise in step 2")
    parser.add_argument("--rendezvous", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if "RANK" in os.environ:
        run_rank(arguments)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        arguments.rendezvous = Path(folder, "rendezvous").as_uri()
        context = mp.get_context("spawn")
        processes = [
            context.Process(target=spawned, args=(r, arguments.ranks, arguments)) for r in range(arguments.ranks)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
    return int(any(process.exitcode for process in processes))


if __name__ == "__main__":
    raise SystemExit(main())
