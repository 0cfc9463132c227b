"""Path A, MXFP4 experts kept: packed codes and exponent bytes as the checkpoint holds them."""

from moe_ops.prep.converted import Converted
from moe_ops.prep.source import Source
from moe_ops.recipes import Recipe


def keep(source: Source, recipe: Recipe, scale_format: str) -> Converted:
    """The codes as int8 and the exponents. Storing packs those into UE8M0 words, one row per weight row."""
    return Converted(source.values.view(recipe.w_dtype), source.factors, exact=True)
