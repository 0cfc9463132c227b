"""moe-ops bench: python -m moe_ops.bench and moe_ops.bench.decode under another name."""

import typer

EXAMPLE = "moe-ops bench -- --shape tiny --recipe bf16; moe-ops bench decode -- --small"


def run(context: typer.Context) -> None:
    """Time whole layers on this machine, each checked first; with `decode` as the first word, decoding steps.

    All arguments go to python -m moe_ops.bench, or to python -m moe_ops.bench.decode: `moe-ops bench -- --help` and
    `moe-ops bench decode -- --help` list them.
    """
    arguments = list(context.args)
    if arguments[:1] == ["decode"]:
        from moe_ops.bench.decode import main  # each needs more than the other commands

        del arguments[0]
    else:
        from moe_ops.bench.__main__ import main
    if arguments[:1] == ["--"]:  # click drops the first one only where nothing stands before it
        del arguments[0]
    raise typer.Exit(main(arguments))
