"""A dispatch format of your own: one class, one line in the table, and the parallel layer takes it by name.

    python examples/07_new_dispatcher.py                             # two processes on this CPU
    torchrun --nproc-per-node 2 examples/07_new_dispatcher.py        # the same; with GPUs, NCCL and one card a rank

The format, `allgather`, brings all ranks' tokens to every rank in one all-gather, and the sums home in one
reduce-scatter of float32: nothing is rounded to bf16 on the way back, for twice the bytes. It reads no count on the
host, so one compiled graph holds it for every token count.
"""

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

import moe_ops
from moe_ops.dispatch import FORMATS, Experts, TokenDispatcher
from moe_ops.dispatch.tokens import PlainTokens
from moe_ops.dispatch.transport_torch import filled
from moe_ops.parallel import ParallelMoE, ParallelSizes, split_experts

E, K, I, TOP_K, MAX_TOKENS, RANKS = 8, 256, 128, 2, 16, 2


@dataclass(frozen=True)
class GatheredTokens(PlainTokens):
    """All ranks' slots, and what this rank's own tokens were."""

    T: int
    dtype: torch.dtype


class AllGather(TokenDispatcher):
    """TokenDispatcher sorts and quantises plain tokens and adds their routes up: left are the way there and back.

    A format whose tokens arrive sorted or quantised derives from Dispatcher, and says what pre_permute and
    post_permute do (moe_ops/dispatch/deepep_ll.py is the shortest).
    """

    name = "allgather"
    sums = "float32 sums"

    def dispatch(self, hidden_states: Tensor, topk_weights: Tensor, topk_ids: Tensor) -> GatheredTokens:
        batch = self._batch(hidden_states, topk_weights, topk_ids)  # checks shapes, dtypes and max_tokens
        gather, slots = self.transport.collectives.all_gather, self.setup.max_tokens
        x = gather(filled(batch.hidden_states.to(torch.bfloat16), slots)).float()  # float32 rows have float32 sums
        weights = gather(filled(batch.topk_weights.float(), slots))
        ids = gather(filled(batch.topk_ids.int(), slots, -1))  # -1: no expert computes an empty slot
        return GatheredTokens(x, weights, ids, hidden_states.shape[0], batch.dtype)

    def combine(self, out: Tensor, state: GatheredTokens) -> Tensor:
        return self.transport.collectives.reduce_scatter(out).narrow(0, 0, state.T).to(state.dtype)


FORMATS[AllGather.name] = AllGather


def router(hidden_states: Tensor, token_ids: Tensor | None) -> tuple[Tensor, Tensor]:
    """The same on every rank: the first E columns are the logits."""
    return moe_ops.topk(hidden_states[:, :E].float(), TOP_K)


@torch.no_grad()
def compare(rank: int, ranks: int, device: torch.device) -> None:
    """Both formats against one rank with all experts, then the new one compiled."""
    generator = torch.Generator().manual_seed(0)
    w13 = torch.randn(E, 2 * I, K, generator=generator) / K**0.5
    w2 = torch.randn(E, K, I, generator=generator) / I**0.5
    whole = moe_ops.prepare_weights(w13.to(device), w2.to(device), recipe="fp8_block")
    x = torch.randn(5 + rank, K, generator=generator).bfloat16().to(device)
    alone = Experts(whole).on_tokens(x.float(), *router(x, None))  # float32: the sum before its rounding
    for name in ("allgather", "flashinfer"):
        mine, sizes = Experts(split_experts(whole, rank, ranks)), ParallelSizes(attn_dp=ranks, ep=ranks)
        layer = ParallelMoE(router, mine, sizes, top_k=TOP_K, dispatch=name, max_tokens=MAX_TOKENS, captured=True)
        out = layer(x)
        error = float((out - alone).norm() / alone.norm())
        say(f"rank {rank}, {name:10}: {len(x)} tokens, {error:.1e} from the float32 sum")
        assert error < 1e-2
        if name == "allgather":
            rounded = alone.to(torch.bfloat16)
            assert device.type != "cpu" or torch.equal(out, rounded), "on a CPU nothing but the result is rounded"
            compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
            assert all(torch.equal(compiled(x[:T].clone()), layer(x[:T])) for T in (5, 3))
            graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
            say(f"rank {rank}, compiled  : {graphs} graph for 5 and 3 tokens")
            assert graphs == 1


def say(line: str) -> None:
    print(line + "\n", end="", flush=True)  # ranks share the terminal: one write a line


def run_rank(rank: int, ranks: int, rendezvous: str) -> None:
    cuda = torch.cuda.is_available() and torch.cuda.device_count() >= ranks
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)  # ranks share the cores
    dist.init_process_group("nccl" if cuda else "gloo", init_method=rendezvous, rank=rank, world_size=ranks)
    compare(rank, ranks, device)
    dist.destroy_process_group()


def main() -> None:
    """Runs this rank under torchrun; otherwise starts RANKS processes."""
    if "RANK" in os.environ:
        run_rank(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), "env://")
        return
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run_rank, (RANKS, Path(folder, "rendezvous").as_uri()), nprocs=RANKS)


if __name__ == "__main__":
    main()
