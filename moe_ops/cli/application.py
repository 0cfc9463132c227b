"""The typer application: its commands, and errors as one red line."""

from typing import Annotated

import typer
from rich.text import Text
from typer.core import TyperGroup

from moe_ops.cli import bench, convert, demo, doctor, plan, simulate, trace, verify, warmup
from moe_ops.cli.screen import stderr


class InWords(TyperGroup):
    """An error of a command is one red line and exit code 2; with --debug, its traceback."""

    def invoke(self, ctx):
        try:
            return super().invoke(ctx)
        except Exception as error:
            if hasattr(error, "exit_code") or isinstance(error, typer.Abort) or ctx.params["debug"]:
                raise  # typer's own say themselves what they are
            said = (ValueError, TypeError, NotImplementedError, ImportError, OSError)
            kind = "" if isinstance(error, said) else f"{type(error).__name__}: "
            stderr().print(Text(f"error: {kind}{error}", style="red"), soft_wrap=True)
            raise typer.Exit(2) from None


app = typer.Typer(
    cls=InWords,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def _options(debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False) -> None:
    """Mixture-of-experts layers as torch.library ops."""


def _add(name: str, module, **settings) -> None:
    app.command(name, epilog=f"Example: {module.EXAMPLE}", **settings)(module.run)


_add("doctor", doctor)
_add("plan", plan)
_add("demo", demo)
_add("bench", bench, context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
_add("warmup", warmup)
_add("convert", convert)
_add("trace", trace)
_add("simulate", simulate)
_add("verify", verify)
