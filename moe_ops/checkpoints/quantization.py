"""Which format a checkpoint's experts are in, read from its config.json."""

from dataclasses import dataclass

from moe_ops import check
from moe_ops.prep.source import BLOCK, MX_GROUP


@dataclass(frozen=True)
class Quantization:
    """The experts' format."""

    kind: str
    """One of prep.source.SOURCES."""
    scale: str = ""
    """What the name of a projection's scale ends in."""
    block: tuple[int, int] = BLOCK
    """(rows, columns) that share a scale, for fp8_block."""


METHODS = ("fp8", "fbgemm_fp8", "mxfp4", "mxfp8", "modelopt", "compressed-tensors")
_ALGORITHMS = {"FP8": "fp8_tensor", "MXFP8": "mxfp8"}
_STRATEGIES = {"tensor": "fp8_tensor", "channel": "fp8_channel", "block": "fp8_block", "group": "mxfp8"}


def read_quantization(op: str, config: dict) -> Quantization:
    """From quantization_config (quant_method, weight_block_size, quant_algo, config_groups) and expert_dtype.

    Raises:
        ValueError: a method, algorithm or strategy that has no preparation path.
    """
    entry = config.get("quantization_config")
    if config.get("expert_dtype", (entry or {}).get("expert_dtype")) == "fp4":
        return Quantization("mxfp4", ".weight_scale_inv")
    if not entry:
        return Quantization("float")
    method = entry.get("quant_method")
    check.one_of(op, "quant_method of config.json", method, METHODS, "Dequantise the checkpoint to bf16 first.")
    if method == "mxfp4":
        return Quantization("mxfp4", ".weight_scale")
    if method == "mxfp8":
        return Quantization("mxfp8", ".weight_scale_inv")
    if method == "fbgemm_fp8":
        return Quantization("fp8_channel", ".weight_scale")
    if method == "modelopt":
        return Quantization(_named(op, "quant_algo", entry.get("quant_algo"), _ALGORITHMS), ".weight_scale")
    if method == "compressed-tensors":
        return _compressed(op, entry)
    block = entry.get("weight_block_size")
    if block is None:
        return Quantization("fp8_tensor", ".weight_scale")
    if list(block) == [1, MX_GROUP]:
        return Quantization("mxfp8", ".weight_scale_inv")
    return Quantization("fp8_block", ".weight_scale_inv", _pair(block))


def _compressed(op: str, entry: dict) -> Quantization:
    groups = list(entry.get("config_groups", {}).values())
    weights = groups[0].get("weights", {}) if groups else {}
    kind = _named(op, "strategy of config_groups", weights.get("strategy"), _STRATEGIES)
    form = (weights.get("type"), weights.get("num_bits"), weights.get("group_size") if kind == "mxfp8" else None)
    want = ("float", 8, MX_GROUP if kind == "mxfp8" else None)
    rule, fix = f"(type, num_bits, group_size) = {want}", "Dequantise the checkpoint to bf16 first."
    check.value(form == want, op, "weights of config_groups", rule, form, fix)
    return Quantization(kind, ".weight_scale", _pair(weights.get("block_structure") or BLOCK))


def _named(op: str, argument: str, got: object, table: dict[str, str]) -> str:
    check.one_of(op, f"{argument} of config.json", got, tuple(table), "Dequantise the checkpoint to bf16 first.")
    return table[str(got)]


def _pair(block) -> tuple[int, int]:
    rows, columns = block
    return int(rows), int(columns)
