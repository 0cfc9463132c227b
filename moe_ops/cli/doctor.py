"""moe-ops doctor: what runs here and why, and what to do about what does not."""

import json
from typing import Annotated

import typer
from rich.markup import escape

from moe_ops.backends import AUTO_RULE
from moe_ops.cli.screen import stdout, table
from moe_ops.doctor import Report, examine
from moe_ops.rows import LAYOUTS

EXAMPLE = "moe-ops doctor --json"


def run(as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False) -> None:
    """Say what is installed, which backend runs what here and why, and what mends what is wrong.

    Exit code 1: something keeps a recipe from the backend that this machine should run it with.
    """
    report = examine()
    if as_json:
        print(json.dumps(report.asdict(), indent=1))
    else:
        _show(report)
    raise typer.Exit(1 if report.problems else 0)


def _show(report: Report) -> None:
    console = stdout()
    machine = table("This machine", "what", "is")
    for name, version in report.versions.items():
        machine.add_row(name, version)
    machine.add_row("cards", escape("\n".join(report.cards)) or "none")
    machine.add_row("arch", report.arch)
    for name, folder in report.caches.items():
        machine.add_row(f"cache of {name}", escape(folder))
    for name, value in report.switches.items():
        machine.add_row(escape(f"${name}"), escape(value))
    if not report.switches:
        machine.add_row("switches", "none set")
    console.print(machine)

    backends = table("GEMMs of each recipe and layout with backend=auto", "recipe", "scales", *LAYOUTS[1:])
    rows: dict[tuple[str, str], list[str]] = {}
    for route in report.routes:
        wrong = route.backend != route.expected
        cell = f"[red]{route.backend}[/red]" if wrong else route.backend or "-"
        rows.setdefault((route.recipe, route.scale_format), []).append(cell)
    for names, cells in rows.items():
        backends.add_row(*names, *cells)
    console.print(backends)
    for why in dict.fromkeys(f"{route.backend or '-'}: {route.why}" for route in report.routes):
        console.print(f"  {why}", markup=False)
    console.print(f"  {AUTO_RULE}\n", markup=False)

    auto = table("layout=auto", "recipe", "takes")
    for recipe, text in report.auto.items():
        auto.add_row(recipe, text)
    console.print(auto)

    for problem in report.problems:
        console.print(f"[red]wrong:[/red] {escape(problem.what)}")
        console.print(f"  [bold]{escape(problem.command)}[/bold]", soft_wrap=True)
    if not report.problems and report.arch == "cpu":
        console.print("Nothing is wrong. There is no card: the reference runs everything, in plain torch.")
    elif not report.problems:
        console.print("Nothing is wrong: every recipe has the backend that this arch should give it.")
