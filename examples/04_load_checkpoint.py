"""Experts from a checkpoint to a running layer: read, prepared, sharded, converted once for later loads.

    python examples/04_load_checkpoint.py                                        # writes a tiny one first
    python examples/04_load_checkpoint.py ./Qwen3-30B-A3B --layer 3 --top-k 8    # a real one

Runs on a CPU in seconds. With a CUDA card the experts go there, in the form that the card reads; to prepare for a card
that this machine does not have, pass --arch sm90 or sm100 (the layer is then loaded and shown, and not run).
"""

import argparse
import tempfile
from pathlib import Path

import torch

import moe_ops
from moe_ops.checkpoints import convert
from moe_ops.testing.checkpoints import write_checkpoint

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def layer_of(path: Path, number: int, top_k: int, weights: moe_ops.MoEWeights) -> moe_ops.MoELayer:
    """Routed as the router's tensors tell: a correction bias goes with sigmoid scores (DeepSeek-V3). What else a
    model's config says, expert groups and a scaling factor, MoELayer takes by the names of moe_ops.topk."""
    router = moe_ops.load_router(path, layer=number, device=DEVICE)
    return moe_ops.MoELayer(
        router.weight,
        weights,
        top_k=top_k,
        router_bias=router.logit_bias,
        bias=router.correction_bias,
        scoring="softmax" if router.correction_bias is None else "sigmoid",
    )


def over_ranks(path: Path, number: int, layer: moe_ops.MoELayer, x: torch.Tensor, ranks: int = 2) -> torch.Tensor:
    """What `ranks` expert-parallel ranks would each compute from their own experts, added up."""
    routing = dict(layer.routing, top_k=layer.sizes.top_k)
    logits = torch.nn.functional.linear(x.to(layer.router_weight.dtype), layer.router_weight, layer.router_bias)
    topk_weights, topk_ids = moe_ops.topk(logits, bias=layer.bias, **routing)
    out = torch.zeros_like(x)
    for rank in range(ranks):
        mine = moe_ops.load_moe_weights(path, layer=number, rank=rank, world=ranks, device=DEVICE, progress=False)
        shard = dict(expert_start=rank * mine.E, num_experts=ranks * mine.E)
        part = moe_ops.fused_deepgemm(
            mine.pad_hidden(x), topk_weights, topk_ids, **mine.tensors(), **mine.attributes(), **shard
        )
        out += mine.cut_hidden(part)
    return out


def difference(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got - want).float().norm() / want.float().norm())


@torch.inference_mode()
def run(path: Path, number: int, top_k: int, recipe: str | None, arch: str | None, folder: Path) -> None:
    torch.manual_seed(0)
    weights = moe_ops.load_moe_weights(path, layer=number, recipe=recipe, arch=arch, device=DEVICE)
    print(f"read:      {weights.report}")
    if arch is not None:
        return
    layer = layer_of(path, number, top_k, weights)
    x = torch.randn(37, layer.K, dtype=torch.bfloat16, device=DEVICE)
    out = layer(x)
    print(f"run:       {tuple(out.shape)} {out.dtype}, norm {float(out.float().norm()):.2f}")

    if recipe is None:
        error = difference(over_ranks(path, number, layer, x), out)
        print(f"sharded:   two ranks' sums differ from the whole by {error:.1e}")
        assert error < 1e-2

    prepared = folder / "prepared"
    convert(path, prepared, layers=[number], recipe=recipe, device=DEVICE, progress=False)
    again = moe_ops.load_moe_weights(prepared, layer=number, device=DEVICE)
    size = sum(file.stat().st_size for file in prepared.iterdir())
    assert torch.equal(layer_of(prepared, number, top_k, again)(x), out)
    print(f"converted: {size / 2**20:.2f} MiB in {prepared.name}/, loaded as they are, the same bits")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", nargs="?", type=Path, help="config.json and safetensors files; default: a tiny model's")
    parser.add_argument("--layer", type=int, default=0)
    parser.add_argument("--top-k", type=int, default=2)
    parser.add_argument("--recipe", help="default: the checkpoint's own kind, as this device reads it")
    parser.add_argument("--arch", help="prepare for cpu, sm90, sm100 or sm120")
    given = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        path = given.path
        if path is None:
            path = Path(folder, "tiny")
            write_checkpoint(path, "deepseek_v3_fp8")
        run(path, given.layer, given.top_k, given.recipe, given.arch, Path(folder))


if __name__ == "__main__":
    main()
