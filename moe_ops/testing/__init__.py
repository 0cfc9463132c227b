"""What tests, benchmarks and examples share: inputs, an independent decoder of weights, comparisons, poison."""

from moe_ops.testing.cases import FORMS, LayerCase, random_routing
from moe_ops.testing.check_op import check_op
from moe_ops.testing.compare import assert_bits_equal, relative_error
from moe_ops.testing.decode import decode_rows, decode_weight
from moe_ops.testing.poison import PATTERNS, poisoned, poisoned_memory

__all__ = [
    "FORMS",
    "PATTERNS",
    "LayerCase",
    "assert_bits_equal",
    "check_op",
    "decode_rows",
    "decode_weight",
    "poisoned",
    "poisoned_memory",
    "random_routing",
    "relative_error",
]
