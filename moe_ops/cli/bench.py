"""moe-ops bench: python -m moe_ops.bench under another name."""

import typer

EXAMPLE = "moe-ops bench -- --shape tiny --recipe bf16"


def run(context: typer.Context) -> None:
    """Time whole layers on this machine, each checked first.

    All arguments go to python -m moe_ops.bench; `moe-ops bench -- --help` lists them.
    """
    from moe_ops.bench.__main__ import main  # more than the other commands need

    raise typer.Exit(main(context.args))
