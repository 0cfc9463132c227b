"""The command `moe-ops`: one file a command, one line each in application.py. Needs the extra `cli`."""

import sys


def main() -> None:
    """Entry point: exits with the pip command where typer or rich are missing."""
    for module in ("typer", "rich"):
        try:
            __import__(module)
        except ImportError:
            sys.exit("moe-ops: typer and rich are not installed. pip install 'fused-moe-ops[cli]'")
    from moe_ops.cli.application import app

    app()
