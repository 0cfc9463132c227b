"""Weights, once, at load: from what a checkpoint holds to what the grouped GEMMs read."""

from moe_ops.prep.decide import decide, table
from moe_ops.prep.prepare import prepare_weights
from moe_ops.prep.repack_weights import repack_weights
from moe_ops.prep.report import Padding, PrepReport
from moe_ops.prep.weights import MoEWeights

__all__ = ["MoEWeights", "Padding", "PrepReport", "decide", "prepare_weights", "repack_weights", "table"]
