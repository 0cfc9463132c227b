"""Every dispatch format over every rank that torchrun starts, checked against the whole layer and timed.

    torchrun --nproc-per-node 8 tests/gpu/dispatch_contract.py            # NCCL, a card each; without cards, gloo
    torchrun --nproc-per-node 4 tests/gpu/dispatch_contract.py --tokens 128 --K 7168 --I 2048 --experts 256
    torchrun --nproc-per-node 2 tests/gpu/dispatch_contract.py --overlap 2    # dispatch.Overlap, so many parts

Each rank brings another number of tokens, rank 1 none. Prints a line a format and recipe; exits with 1 if one differs.
"""

import argparse
import os
import statistics
import time
from datetime import timedelta

import torch
import torch.distributed as dist

import moe_ops
from moe_ops import dispatch
from moe_ops.arch import runs
from moe_ops.dispatch import FORMATS, Experts, ExpertSetup, Overlap, TorchTransport
from moe_ops.parallel import failing_together, split_experts
from moe_ops.recipes import RECIPES
from moe_ops.testing import relative_error


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = dict(tokens=16, K=512, I=256, experts=32, top_k=4, repeats=5)
    for name, size in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=size)
    parser.add_argument("--overlap", type=int, default=0, help="parts of the tokens, overlapped; 0: in one piece")
    return parser.parse_args()


def milliseconds(call, device: torch.device, repeats: int) -> float:
    """Median wall time of a call that all ranks make together, the slowest rank's."""
    times = []
    for _ in range(repeats):
        dist.barrier()
        start = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(1e3 * (time.perf_counter() - start))
    slowest = torch.tensor(statistics.median(times), device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return float(slowest)


def main() -> int:
    given = arguments()
    overlap = Overlap(given.overlap) if given.overlap else None
    capacity = given.tokens if overlap is None else overlap.capacity(given.tokens)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    dist.init_process_group("nccl" if cuda else "gloo", timeout=timedelta(seconds=120))
    failed = 0
    with torch.no_grad(), failing_together():
        for recipe, row in RECIPES.items():
            generator = torch.Generator().manual_seed(0)
            shape = (given.experts, 2 * given.I, given.K), (given.experts, given.K, given.I)
            w13, w2 = (torch.randn(s, generator=generator).div_(s[2] ** 0.5).to(device) for s in shape)
            whole = moe_ops.prepare_weights(w13, w2, recipe=recipe)
            if not runs(recipe, whole.scale_format, device):
                continue
            own = Experts(split_experts(whole, rank, world))
            T = 0 if rank == 1 else max(1, given.tokens - rank)
            x = torch.randn(T, given.K, generator=generator.manual_seed(rank + 1)).bfloat16().to(device)
            ids = torch.rand(T, given.experts, generator=generator).argsort(1)[:, : given.top_k].int().to(device)
            weights = torch.rand(T, given.top_k, generator=generator).to(device)
            want = Experts(whole).on_tokens(x, weights, ids, routed_scaling_factor=2.5)
            for name in (name for name, form in FORMATS.items() if form.reduces):
                setup = ExpertSetup.of(
                    own.weights, ranks=world, top_k=given.top_k, max_tokens=capacity, routed_scaling_factor=2.5
                )
                here = dispatch.create(name, setup, TorchTransport())

                def layer(here=here, own=own, batch=(x, weights, ids)):
                    return dispatch.run(here, own, *batch, overlap=overlap)

                error = torch.tensor(relative_error(layer(), want), device=device)
                dist.all_reduce(error, dist.ReduceOp.MAX)
                median = milliseconds(layer, device, given.repeats)
                wrong = not float(error) < row.max_diff
                failed += wrong
                if rank == 0:
                    verdict = "WRONG" if wrong else "ok"
                    print(f"{name:20} {recipe:10} {float(error):.4f} {median:9.3f} ms  {verdict}", flush=True)
    dist.destroy_process_group()
    return int(failed > 0)


if __name__ == "__main__":
    raise SystemExit(main())
