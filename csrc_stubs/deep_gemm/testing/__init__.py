"""Comparisons, under the library's names. Its timers need a card and are not here."""

from . import numeric, utils
from .numeric import assert_bitwise_equal, calc_diff, count_bytes
from .utils import get_arch_major

__all__ = [
    "assert_bitwise_equal",
    "calc_diff",
    "count_bytes",
    "get_arch_major",
    "numeric",
    "utils",
]
