"""moe-ops demo: one small layer through the four recipes: its error, its graphs, its memory."""

from typing import Annotated

import torch
import typer
from torch.nn.functional import linear

import moe_ops
from moe_ops.arch import default_scale_format, here
from moe_ops.cli.screen import stdout, table
from moe_ops.recipes import RECIPES, Recipe
from moe_ops.reference.moe import moe
from moe_ops.testing.compare import relative_error
from moe_ops.testing.decode import decode_weight

EXAMPLE = "moe-ops demo"
E, K, I, TOP_K = 8, 256, 128, 2
LENGTHS = (2, 37, 200)


def run(
    compiler: Annotated[str, typer.Option(help="Backend of torch.compile: aot_eager, or inductor.")] = "aot_eager",
) -> None:
    """Compile a small layer in each recipe, run it at three lengths, and hold it against float64.

    Exit code 1: an error is above its bound, a result differs from eager, or there is more than one graph.
    """
    device = here()
    console = stdout()
    console.print(f"E={E} experts, hidden K={K}, intermediate I={I}, {TOP_K} routes a token, on {device.type}")
    right = ("error", "bound", "graphs", "KiB of weights", "KiB of workspace")
    shown = table(f"Compiled once, called with {LENGTHS} tokens", "recipe", *right, "", right=right)
    failed = False
    for name, recipe in RECIPES.items():
        graphs, error, equal, weight_bytes = _through(recipe, device, compiler)
        plan = moe_ops.plan(T=max(LENGTHS), E=E, K=K, I=I, top_k=TOP_K, recipe=name)
        good = error <= recipe.max_diff and graphs == 1 and equal
        failed |= not good
        verdict = "[green]as eager[/green]" if good else "[red]wrong[/red]"
        kib = (f"{weight_bytes / 1024:.0f}", f"{plan.workspace_bytes / 1024:.0f}")
        shown.add_row(name, f"{error:.4f}", f"{recipe.max_diff}", str(graphs), *kib, verdict)
    console.print(shown)
    console.print("error: of the result, relative to float64 with the same dequantised weights.")
    console.print("graphs: that torch.compile(fullgraph=True, dynamic=True) made for all lengths.")
    console.print("Next: moe-ops plan --help, moe-ops verify, moe-ops doctor.")
    raise typer.Exit(1 if failed else 0)


def _through(recipe: Recipe, device: torch.device, compiler: str) -> tuple[int, float, bool, int]:
    """(graphs, error, whether compiled and eager agree, bytes of the weights)."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) / shape[-1] ** 0.5).to(device)

    scale_format = default_scale_format(recipe, device)
    w13, w2, router = normal(E, 2 * I, K), normal(E, K, I), normal(E, K) * K**0.5
    weights = moe_ops.prepare_weights(w13, w2, recipe=recipe.name, scale_format=scale_format)
    layer = moe_ops.MoELayer(router, weights, top_k=TOP_K)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=compiler)
    equal = True
    for T in LENGTHS:
        x = (torch.randn(T, K, generator=generator)).to(device, torch.bfloat16)
        out, eager = compiled(x), layer(x)
        equal &= relative_error(out, eager) <= recipe.max_diff if device.type == "cuda" else torch.equal(out, eager)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    topk_weights, topk_ids = moe_ops.topk(linear(x.float(), router), TOP_K)
    plain = (decode_weight(w.cpu(), None if s is None else s.cpu(), recipe) for w, s in _pairs(weights))
    judged = moe(x.cpu(), topk_weights.cpu(), topk_ids.cpu(), *plain)
    taken = sum(t.nbytes for t in weights.tensors().values() if t is not None)
    return graphs, relative_error(out.cpu(), judged), equal, taken


def _pairs(weights: moe_ops.MoEWeights):
    return ((weights.w13, weights.w13_scale), (weights.w2, weights.w2_scale))
