"""The options that say how large a layer is, and the sizes in a model's config.json."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from moe_ops import check
from moe_ops.checkpoints.family import text_config
from moe_ops.recipes import get_recipe
from moe_ops.rows import align

_NAMES = {
    "E": ("num_experts", "n_routed_experts", "num_local_experts"),
    "K": ("hidden_size",),
    "I": ("moe_intermediate_size", "intermediate_size"),
    "top_k": ("num_experts_per_tok", "experts_per_token", "num_experts_per_token"),
}
"""Letter -> the names that models' config.json have for it; the first that is there counts."""

Config = Annotated[Path | None, typer.Option(help="A model's config.json, or the directory that holds it.")]
Experts = Annotated[int | None, typer.Option("--experts", "-E", help="Experts of the model.")]
Hidden = Annotated[int | None, typer.Option("--hidden", "-K", help="Hidden size.")]
Intermediate = Annotated[int | None, typer.Option("--intermediate", "-I", help="Intermediate size of an expert.")]
TopK = Annotated[int | None, typer.Option("--top-k", help="Routes a token takes.")]
Tokens = Annotated[int, typer.Option("--tokens", "-T", help="Tokens of one call.")]
Recipe = Annotated[str, typer.Option(help="bf16, fp8_block, mxfp8 or mxfp4.")]
Layout = Annotated[str, typer.Option(help="auto, contiguous, masked, gathered or direct.")]
Backend = Annotated[str, typer.Option(help="auto, reference, triton or deep_gemm.")]
World = Annotated[int, typer.Option(help="Expert-parallel ranks that share the experts.")]


@dataclass(frozen=True)
class Sizes:
    """Of a layer on one rank, padded to the recipe's groups as prepare_weights pads it."""

    E: int
    K: int
    I: int
    top_k: int
    num_experts: int
    padded: tuple[str, ...]
    """One note for each size that was padded."""

    @property
    def here(self) -> dict[str, int]:
        return dict(E=self.E, K=self.K, I=self.I, top_k=self.top_k)


def read(op: str, config: Path | None, recipe: str, world: int, defaults: dict | None = None, **given) -> Sizes:
    """The sizes in `given` (E, K, I, top_k), else those of config.json, else the defaults.

    Raises:
        ValueError: a size is nowhere to be found or is no positive integer, or the ranks do not divide the experts.
    """
    stored = {} if config is None else _of_config(op, config)
    sizes = {}
    for name in _NAMES:
        size = given[name] if given[name] is not None else stored.get(name, (defaults or {}).get(name))
        fix = "Pass --config, or all of --experts, --hidden, --intermediate and --top-k."
        check.value(isinstance(size, int) and size > 0, op, name, "a positive integer", size, fix)
        sizes[name] = size
    E = sizes["E"]
    check.value(world > 0 and E % world == 0, op, "world", f"a divisor of the {E} experts", world, "Choose one.")
    granule, notes = get_recipe(op, recipe).granule, []
    for name in ("K", "I"):
        whole = align(sizes[name], granule)
        if whole != sizes[name]:
            notes.append(f"{name}={sizes[name]} is padded to {whole}: {recipe} scales {granule} columns together.")
            sizes[name] = whole
    return Sizes(E // world, sizes["K"], sizes["I"], sizes["top_k"], E, tuple(notes))


def _of_config(op: str, path: Path) -> dict[str, object]:
    path = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(path.read_text())
    except (ValueError, FileNotFoundError) as error:
        got = f"{path}, {type(error).__name__}"
        raise ValueError(check.sentence(op, "config", "a file of JSON", got, "Check the path.")) from None
    check.value(isinstance(config, dict), op, "config", "a JSON object", type(config).__name__, "Check the file.")
    config = text_config(config)
    found = {}
    for letter, names in _NAMES.items():
        name = next((name for name in names if config.get(name) is not None), None)
        if name is not None:
            found[letter] = config[name]
    fix = "Pass the config of a mixture-of-experts model, or the sizes."
    has = "E" in found
    check.value(has, op, "config", "one with " + " or ".join(_NAMES["E"]), f"none of them in {path}", fix)
    return found
