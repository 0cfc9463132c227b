"""A real mixture-of-experts language model through the four recipes, compiled and checked.

Scores held-back text against the eager bf16 model, counts the compiled graphs, decodes byte by
byte, and prints the buffer plan of one layer. Exits with a sentence if a check fails.

    python examples/01_tiny_moe_lm.py

Runs on a CPU in about a minute, and stays there: its layers are too small for a card. 02 and 03 take real sizes on one.
"""

from __future__ import annotations

import math
import sys
import time
from dataclasses import dataclass

import torch
from rich import box
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text
from tiny_moe_lm import corpus
from tiny_moe_lm.model import Cache, Config, load_checkpoint
from tiny_moe_lm.runtime import (
    Sample,
    Score,
    compile_backend,
    compile_decoder,
    generate,
    score,
    step,
)

import moe_ops

PROMPT_LENGTHS = (3, 17, 64, 200)
PROMPT = b"    def __init__(self, name, value=None):\n"
DECODED_BYTES = 160

# Rounding at fusion boundaries moves a compiled graph a little.
COMPILED_TOLERANCE = 0.005
# What a recipe may cost in perplexity: about three times what it does cost this model.
RECIPE_TOLERANCE = {"bf16": COMPILED_TOLERANCE, "fp8_block": 0.005, "mxfp8": 0.005, "mxfp4": 0.02}


@dataclass(frozen=True)
class Run:
    """One recipe, eager and compiled."""

    recipe: str
    eager: Score
    compiled: Score
    sample: Sample
    graphs: int
    compile_seconds: float

    @property
    def agreement(self) -> float:
        """Share of held-back places where eager and compiled choose the same next byte."""
        return (self.eager.choices == self.compiled.choices).float().mean().item()


def graphs_compiled() -> int:
    """Graphs that Dynamo has compiled since its counters were cleared."""
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def run_recipe(recipe: str, backend: str, chunks: torch.Tensor) -> Run:
    """Score, prompt and decode with the experts prepared for `recipe`."""
    # Each recipe is a model of its own: without the reset the four would share one cache of graphs.
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = load_checkpoint(recipe)
    config: Config = model.config
    eager = score(model, config, chunks)

    decoder = compile_decoder(model, backend)
    start, cache = torch.zeros((), dtype=torch.int64), Cache(config, batch=1)
    began = time.perf_counter()
    for length in PROMPT_LENGTHS:
        step(decoder, chunks[:1, :length], start, cache)
        if length == PROMPT_LENGTHS[0]:
            compile_seconds = time.perf_counter() - began
    compiled = score(decoder, config, chunks)
    sample = generate(decoder, config, PROMPT, DECODED_BYTES)
    return Run(recipe, eager, compiled, sample, graphs_compiled(), compile_seconds)


def change(value: Score, base: Score) -> float:
    """Relative change in perplexity."""
    return math.exp(value.nats - base.nats) - 1


def failures(runs: list[Run], base: Score) -> list[str]:
    """One sentence for each check that does not hold."""
    found = []
    for run in runs:
        limit = RECIPE_TOLERANCE[run.recipe]
        worse = change(run.compiled, base)
        # Written so that a perplexity of NaN fails as well.
        if not worse <= limit:
            found.append(
                f"{run.recipe}: compiled perplexity is {worse:+.2%} from eager bf16, "
                f"and at most {limit:+.1%} is allowed."
            )
        moved = change(run.compiled, run.eager)
        if not abs(moved) <= COMPILED_TOLERANCE:
            found.append(
                f"{run.recipe}: compiled perplexity is {moved:+.2%} from the same recipe in eager, "
                f"and at most {COMPILED_TOLERANCE:.1%} either way is allowed."
            )
        if run.graphs != 1:
            found.append(f"{run.recipe}: {run.graphs} graphs were compiled where one should do.")
    return found


def results_table(runs: list[Run], base: Score) -> Table:
    """Quality, graphs and speed, a row for the eager base and for each compiled recipe."""
    table = Table(title="Held-back text and decoding", box=box.SIMPLE_HEAD)
    table.add_column("recipe")
    for heading in ("perplexity", "vs base", "bits/byte", "as eager", "graphs", "bytes/s"):
        table.add_column(heading, justify="right")
    bits = base.nats / math.log(2)
    table.add_row("bf16 eager", f"{math.exp(base.nats):.4f}", "base", f"{bits:.4f}")
    for run in runs:
        table.add_row(
            run.recipe,
            f"{math.exp(run.compiled.nats):.4f}",
            f"{change(run.compiled, base):+.2%}",
            f"{run.compiled.nats / math.log(2):.4f}",
            f"{run.agreement:.2%}",
            str(run.graphs),
            f"{run.sample.steps / run.sample.seconds:.0f}",
        )
    return table


def main() -> None:
    """Run the demo; SystemExit with a sentence if a check fails."""
    torch.set_num_threads(1)  # the model is so small that a second thread costs more than it brings
    console = Console()
    backend = compile_backend()
    if backend != "inductor":
        console.print(f"No C++ compiler found: compiling with the {backend} backend instead.")
    chunks = corpus.held_back_chunks()
    places = chunks[:, 1:].numel()
    console.print(f"{places} held-back bytes; {torch.get_num_threads()} threads; {backend}.")

    runs = []
    for recipe in RECIPE_TOLERANCE:
        runs.append(run_recipe(recipe, backend, chunks))
        console.print(f"{recipe}: first compiled call took {runs[-1].compile_seconds:.1f} s.")
    base = runs[0].eager
    console.print(results_table(runs, base))
    console.print("Below the base all is compiled; as eager: how often it picks the byte that eager does.")
    lengths = ", ".join(str(length) for length in PROMPT_LENGTHS)
    console.print(
        f"Graphs served prompts of {lengths} and {len(PROMPT)} bytes, "
        f"a batch of {chunks.shape[0]} x {chunks.shape[1] - 1}, and every decoding step."
    )
    console.print(Panel(Text(runs[0].sample.text), title="greedy sample, bf16 compiled"))

    config = load_checkpoint("mxfp8").config
    plan = moe_ops.plan(
        T=places,
        E=config.experts,
        K=config.hidden,
        I=config.intermediate,
        top_k=config.topk,
        recipe="mxfp8",
        layout="auto",
    )
    # Not through rich, which would wrap the columns and read brackets as markup.
    print(plan)

    problems = failures(runs, base)
    if problems:
        sys.exit("\n".join(problems))
    console.print("All checks hold.")


if __name__ == "__main__":
    main()
