"""A language model with MoE layers as one graph: compiled for every length, exported, saved and loaded.

    python examples/02_compile_model.py

Runs on a CPU in under a minute. With a CUDA card it runs there, in the sizes of Qwen3-30B-A3B's layers: nothing to
change. For CUDA graphs see examples/03_decode_graphs.py.
"""

import argparse
import tempfile
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.decorators import mark_unbacked

import moe_ops

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
E, K, I, TOP_K, HEADS, LAYERS = (128, 2048, 768, 8, 32, 2) if DEVICE == "cuda" else (8, 256, 128, 2, 4, 2)
VOCABULARY, RECIPE = 512, "fp8_block"


class Block(nn.Module):
    """Attention, then experts, each beside a residual."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(K, 3 * K, bias=False)
        self.out = nn.Linear(K, K, bias=False)
        w13, w2 = torch.randn(E, 2 * I, K) / K**0.5, torch.randn(E, K, I) / I**0.5
        self.moe = moe_ops.MoELayer(torch.randn(E, K), moe_ops.prepare_weights(w13, w2, recipe=RECIPE), top_k=TOP_K)

    def forward(self, x):
        heads = self.qkv(F.rms_norm(x, (K,))).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.moe(F.rms_norm(x, (K,)))


class Model(nn.Module):
    """(B, S) ids -> (B, S, VOCABULARY) logits."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, K)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.head = nn.Linear(K, VOCABULARY, bias=False)

    def forward(self, ids):
        return self.head(self.blocks(self.embed(ids)))


def prompt(length: int) -> torch.Tensor:
    return torch.randint(VOCABULARY, (1, length), device=DEVICE)


def reset() -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


def graphs() -> int:
    """Compiled since the reset."""
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def check(got: torch.Tensor, want: torch.Tensor, what: str) -> None:
    error = float((got - want).float().norm() / want.float().norm())
    print(f"{what}: differs from eager by {error:.1e}")
    assert error < 1e-2, what  # another order of sums may flip a rounding to fp8


@torch.no_grad()  # the experts are for inference, and refuse inputs that want a gradient
def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="inductor", help="of torch.compile; aot_eager needs no C++ compiler")
    backend = parser.parse_args(argv).backend
    torch.manual_seed(0)
    model = Model().to(DEVICE).eval()

    reset()
    start = time.perf_counter()
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=backend)
    for length in (2, 37, 200):
        ids = prompt(length)
        check(compiled(ids), model(ids), f"compiled, {length} tokens")
    print(f"{graphs()} graph for these lengths, {time.perf_counter() - start:.0f} s\n")
    assert graphs() == 1

    # torch compiles a size of one by itself. A size that is marked is never looked at, so one graph has it too: the
    # experts allow it. scaled_dot_product_attention asks whether there are tokens, so here it is the layer alone;
    # examples/01_tiny_moe_lm.py is a whole model of this kind.
    layer = model.blocks[0].moe
    reset()
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=backend)
    for tokens in (1, 9):
        x = torch.randn(tokens, K, device=DEVICE)
        mark_unbacked(x, 0)
        check(compiled(x), layer(x), f"one layer, marked, {tokens} tokens")
    print(f"{graphs()} graph for one token and for more\n")
    assert graphs() == 1

    exported = torch.export.export(model, (prompt(16),), dynamic_shapes={"ids": {1: torch.export.Dim("S", min=2)}})
    nodes = [str(node.target) for node in exported.graph.nodes if str(node.target).startswith("moe.")]
    print(f"exported, {LAYERS} layers: {', '.join(nodes)}")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "model.pt2")
        torch.export.save(exported, file)
        reloaded = torch.export.load(file).module()
    ids = prompt(53)
    check(reloaded(ids), model(ids), "exported, saved and loaded, 53 tokens")


if __name__ == "__main__":
    main()
