"""moe-ops convert: a checkpoint's experts in prepared form."""

from pathlib import Path
from typing import Annotated

import typer

from moe_ops import check
from moe_ops.checkpoints import convert

EXAMPLE = "moe-ops convert ./DeepSeek-V3 ./DeepSeek-V3-sm90 --arch sm90 --layers 3-5"


def run(
    source: Annotated[Path, typer.Argument(help="A checkpoint: config.json and safetensors files.")],
    target: Annotated[Path, typer.Argument(help="Directory for the prepared layers.")],
    recipe: Annotated[str | None, typer.Option(help="bf16, fp8_block, mxfp8, mxfp4. Default: by source.")] = None,
    scale_format: Annotated[str | None, typer.Option(help="fp32 or ue8m0. Default: what the arch reads.")] = None,
    arch: Annotated[str | None, typer.Option(help="Will run it: cpu, sm90, sm100 or sm120. Default: --device.")] = None,
    device: Annotated[str, typer.Option(help="Where to compute: cpu or cuda.")] = "cpu",
    layers: Annotated[str | None, typer.Option(help="Such as 3-5,8. Default: all that have experts.")] = None,
    parallel: Annotated[str, typer.Option(help="ep or tp.")] = "ep",
    world: Annotated[int, typer.Option(help="Ranks to shard for. 1 serves every ep world.")] = 1,
    on_inexact: Annotated[str, typer.Option(help="raise or warn, if MXFP4 cannot be held exactly as fp8.")] = "raise",
) -> None:
    """Write a checkpoint's experts in prepared form, to load with no further work.

    On a terminal a bar counts the experts of the layer at hand; a line is printed for each layer that is done.
    """
    convert(
        source,
        target,
        layers=None if layers is None else _numbers(layers),
        parallel=parallel,
        world=world,
        say=typer.echo,
        recipe=recipe,
        scale_format=scale_format,
        arch=arch,
        device=device,
        on_inexact=on_inexact,
        progress=True,
    )


def _numbers(text: str) -> list[int]:
    """3-5,8 -> [3, 4, 5, 8]."""
    numbers: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        ok = first.strip().isdigit() and (last or first).strip().isdigit() and int(first) <= int(last or first)
        check.value(ok, "convert", "layers", "numbers and ranges", repr(text), "Write them like 3-5,8.")
        numbers += range(int(first), int(last or first) + 1)
    return numbers
