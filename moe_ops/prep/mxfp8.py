"""Path D, MXFP8 kept: values and exponent bytes as the checkpoint holds them. MXFP4 widens to it without loss."""

from moe_ops.prep.converted import Converted
from moe_ops.prep.source import E4M3, Source, decode_e2m1
from moe_ops.recipes import Recipe


def keep(source: Source, recipe: Recipe, scale_format: str) -> Converted:
    return Converted(source.values, source.factors, exact=True)


def from_mxfp4(source: Source, recipe: Recipe, scale_format: str) -> Converted:
    """Every e2m1 value is an e4m3 value; the groups and their scales are the same."""
    return Converted(decode_e2m1(source.values).to(E4M3), source.factors, exact=True)
