"""moe-ops verify: the correctness matrix of this machine."""

from typing import Annotated

import typer
from rich.markup import escape

from moe_ops.cli.screen import stdout, table
from moe_ops.recipes import RECIPES, get_recipe
from moe_ops.verify import verify

EXAMPLE = "moe-ops verify --quick --recipe fp8_block"


def run(
    quick: Annotated[bool, typer.Option("--quick", help="Three cases of each instead of fourteen.")] = False,
    recipe: Annotated[list[str] | None, typer.Option(help="Only this one; may be repeated.")] = None,
) -> None:
    """Check every recipe, layout and backend that runs here against a float64 loop.

    Exit code 1: a result is further from it than its recipe allows.
    """
    recipes = tuple(get_recipe("verify", name).name for name in recipe or RECIPES)
    console = stdout()
    title = "Relative error against float64 on the same dequantised weights"
    shown = table(title, "recipe", "scales", "layout", "backend", "error", "bound", "")
    failures, cases = [], 0
    for outcome in verify(quick, recipes):
        verdict = "[green]holds[/green]" if outcome.holds else "[red]fails[/red]"
        names = (outcome.recipe, outcome.scale_format, outcome.layout, outcome.backend)
        shown.add_row(*names, f"{outcome.error:.4f}", f"{outcome.bound}", verdict)
        failures += [f"{' '.join(names)}, {failure}" for failure in outcome.failures]
        cases += outcome.cases
    console.print(shown)
    for failure in failures:
        console.print(f"[red]{escape(failure)}[/red]")
    console.print(f"{cases - len(failures)} of {cases} cases hold.")
    raise typer.Exit(1 if failures else 0)
