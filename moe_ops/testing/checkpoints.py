"""Synthetic checkpoints: a tiny model's MoE layers in every format that the loaders read, and what they mean."""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from moe_ops.prep import MoEWeights
from moe_ops.recipes import get_recipe
from moe_ops.testing.decode import decode_e4m3, decode_weight
from moe_ops.testing.encode import (
    decode_block,
    decode_mx,
    encode_block,
    encode_mx,
    encode_rows,
    encode_tensor,
)

_FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128]}
_CHANNEL = {"config_groups": {"group_0": {"weights": {"type": "float", "num_bits": 8, "strategy": "channel"}}}}


@dataclass(frozen=True)
class Format:
    """One format: its family's config keys and names, and how a matrix is encoded."""

    model_type: str
    kind: str
    block: str
    parts: tuple[str, str, str]
    num_experts: str
    intermediate: str
    quantization: dict | None = None
    more: tuple[tuple[str, str], ...] = ()
    scale: str = ".weight_scale"
    exponents: torch.dtype = torch.uint8
    """Of MX scales."""
    stacked: str | None = None
    """gpt-oss only: blocks or transposed."""


_DEEPSEEK = ("n_routed_experts", "moe_intermediate_size")
_QWEN = ("num_experts", "moe_intermediate_size")
_LOCAL = ("num_local_experts", "intermediate_size")
_PROJ, _W = ("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2")
_MLP, _FFN, _SPARSE = "model.layers.{}.mlp.", "layers.{}.ffn.", "model.layers.{}.block_sparse_moe."
_INV = ".weight_scale_inv"
_E8M0 = torch.float8_e8m0fnu

FORMATS = {
    "deepseek_v3_fp8": Format("deepseek_v3", "fp8_block", _MLP, _PROJ, *_DEEPSEEK, _FP8, scale=_INV),
    "deepseek_v4_mxfp4": Format(
        "deepseek_v4",
        "mxfp4",
        _FFN,
        _W,
        *_DEEPSEEK,
        _FP8 | {"scale_fmt": "ue8m0"},
        more=(("expert_dtype", "fp4"),),
        scale=".scale",
        exponents=_E8M0,
    ),
    "qwen3_bf16": Format("qwen3_moe", "float", _MLP, _PROJ, *_QWEN),
    "qwen3_fp8": Format("qwen3_moe", "fp8_block", _MLP, _PROJ, *_QWEN, _FP8, scale=_INV),
    "qwen3_fp8_tensor": Format("qwen3_moe", "fp8_tensor", _MLP, _PROJ, *_QWEN, {"quant_method": "fp8"}),
    "qwen3_fp8_channel": Format(
        "qwen3_moe", "fp8_channel", _MLP, _PROJ, *_QWEN, {"quant_method": "compressed-tensors", **_CHANNEL}
    ),
    "qwen3_mxfp8": Format("qwen3_moe", "mxfp8", _MLP, _PROJ, *_QWEN, {"quant_method": "mxfp8"}, scale=_INV),
    "qwen3_mxfp8_modelopt": Format(
        "qwen3_moe", "mxfp8", _MLP, _PROJ, *_QWEN, {"quant_method": "modelopt", "quant_algo": "MXFP8"}
    ),
    "mixtral_bf16": Format("mixtral", "float", _SPARSE, _W, *_LOCAL),
    "gpt_oss_mxfp4": Format("gpt_oss", "mxfp4", _MLP, _PROJ, *_LOCAL, {"quant_method": "mxfp4"}, stacked="blocks"),
    "gpt_oss_bf16": Format("gpt_oss", "float", _MLP, _PROJ, *_LOCAL, stacked="transposed"),
}


@dataclass(frozen=True, eq=False)
class Truth:
    """What one layer of a synthetic checkpoint means: the judge's arguments, float64."""

    w13: Tensor
    """(E, 2 I, K), dequantised."""
    w2: Tensor
    w13_bias: Tensor | None = None
    w2_bias: Tensor | None = None


def meaning(weights: MoEWeights) -> Truth:
    """What prepared weights mean: dequantised by the formats' definitions, without their padding."""
    row = get_recipe("meaning", weights.recipe)
    K, I = weights.K - weights.padding.K, weights.I - weights.padding.I
    w13 = decode_weight(weights.w13, weights.w13_scale, row).unflatten(1, (2, -1))[:, :, :I, :K].flatten(1, 2)
    w2 = decode_weight(weights.w2, weights.w2_scale, row)[:, :K, :I]
    b13, b2 = weights.w13_bias, weights.w2_bias
    return Truth(
        w13,
        w2,
        None if b13 is None else b13.double().unflatten(1, (2, -1))[:, :, :I].flatten(1),
        None if b2 is None else b2.double()[:, :K],
    )


def added_error(got: Truth, want: Truth) -> float:
    """Relative error (Frobenius) of both matrices together."""
    flat = [torch.cat((t.w13.flatten(), t.w2.flatten())) for t in (got, want)]
    return float((flat[0] - flat[1]).norm() / flat[1].norm())


def write_checkpoint(
    root: Path,
    name: str,
    *,
    E: int = 4,
    K: int = 256,
    I: int = 128,
    layers: int = 1,
    seed: int = 0,
    files: int = 2,
    powers_of_two: bool = False,
    spread: float = 0.0,
) -> list[Truth]:
    """Writes a checkpoint of a format in FORMATS to `root`, over several files with an index, and returns its meaning.

    Args:
        powers_of_two: fp8 block scales are powers of two.
        spread: standard deviation, in powers of two, of the magnitudes of rows: how far apart block scales lie.
    """
    form = FORMATS[name]
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    truths = []
    for layer in range(layers):
        prefix = form.block.format(layer)
        parts = []
        for expert in range(E):
            for part, shape in zip(form.parts, ((I, K), (I, K), (K, I)), strict=True):
                x = torch.randn(shape, generator=generator, dtype=torch.float64) / shape[1] ** 0.5
                x = x * torch.exp2(spread * torch.randn(shape[0], 1, generator=generator).double())
                stored, meaning = _encode(form, x, powers_of_two)
                parts.append((stored, meaning))
                if form.stacked is None:
                    stem = f"{prefix}experts.{expert}.{part}"
                    tensors |= {stem + suffix: tensor for suffix, tensor in stored.items()}
        gate, up, down = (torch.stack([meaning for _, meaning in parts[i::3]]) for i in range(3))
        biases = {}
        if form.stacked is not None:
            biases = {name: torch.randn(E, N, generator=generator) / 4 for name, N in (("13", 2 * I), ("2", K))}
            tensors |= _stack(form, prefix, [stored for stored, _ in parts], biases)
        tensors |= _router(form, prefix, E, K, generator, layer)
        truths.append(
            Truth(
                torch.cat((gate, up), 1),
                down,
                **{f"w{name}_bias": bias.bfloat16().double() for name, bias in biases.items()},
            )
        )
    config = {"model_type": form.model_type, form.num_experts: E, "hidden_size": K, form.intermediate: I}
    config |= dict(form.more)
    if form.quantization:
        config["quantization_config"] = form.quantization
    _save(root, config, tensors, files)
    return truths


def _encode(form: Format, x: Tensor, powers_of_two: bool) -> tuple[dict[str, Tensor], Tensor]:
    """({suffix: tensor}, float64 meaning)."""
    if form.kind == "float":
        return {".weight": x.bfloat16()}, x.bfloat16().double()
    if form.kind in ("mxfp4", "mxfp8"):
        dtype = "e2m1" if form.kind == "mxfp4" else "e4m3"
        values, scale = encode_mx(x, dtype)
        meaning = decode_mx(values, scale, dtype)
        values = values.view(torch.int8) if dtype == "e2m1" and form.stacked is None else values
        return {".weight": values, form.scale: scale.view(form.exponents)}, meaning
    if form.kind == "fp8_block":
        values, scale = encode_block(x, (128, 128), powers_of_two=powers_of_two)
        return {".weight": values, form.scale: scale}, decode_block(values, scale, (128, 128))
    values, scale = encode_rows(x) if form.kind == "fp8_channel" else encode_tensor(x)
    return {".weight": values, form.scale: scale}, decode_e4m3(values) * scale.double()


def _stack(form: Format, prefix: str, parts: list[dict[str, Tensor]], biases: dict[str, Tensor]) -> dict[str, Tensor]:
    """gpt-oss: gate and up rows alternate in one tensor with all experts."""

    def both(suffix):
        gate, up, down = (torch.stack([part[suffix] for part in parts[i::3]]) for i in range(3))
        return torch.stack((gate, up), 2).flatten(1, 2), down

    out = {}
    for stem, index in (("gate_up_proj", 0), ("down_proj", 1)):
        values = both(".weight")[index]
        if form.stacked == "blocks":
            out[f"{prefix}experts.{stem}_blocks"] = values.unflatten(2, (-1, 16)).contiguous()
            out[f"{prefix}experts.{stem}_scales"] = both(form.scale)[index].contiguous()
        else:
            out[f"{prefix}experts.{stem}"] = values.transpose(1, 2).contiguous()
    mixed = biases["13"].unflatten(1, (2, -1)).transpose(1, 2).flatten(1)
    out[f"{prefix}experts.gate_up_proj_bias"] = mixed.bfloat16().contiguous()
    out[f"{prefix}experts.down_proj_bias"] = biases["2"].bfloat16()
    return out


def _router(form: Format, prefix: str, E: int, K: int, generator: torch.Generator, layer: int) -> dict[str, Tensor]:
    weight = torch.randn(E, K, generator=generator).bfloat16()
    bias = torch.randn(E, generator=generator)
    if form.model_type == "gpt_oss":
        return {f"{prefix}router.weight": weight, f"{prefix}router.bias": bias.bfloat16()}
    more = {}
    if form.model_type == "deepseek_v3":
        more = {f"{prefix}gate.e_score_correction_bias": bias}
    if form.model_type == "deepseek_v4":
        table = torch.randint(0, E, (50, 2), generator=generator)
        more = {f"{prefix}gate.tid2eid": table} if layer == 0 else {f"{prefix}gate.bias": bias}
    return {f"{prefix}gate.weight": weight, **more}


def _save(root: Path, config: dict, tensors: dict[str, Tensor], files: int) -> None:
    from safetensors.torch import save_file

    root.mkdir(parents=True, exist_ok=True)
    (root / "config.json").write_text(json.dumps(config))
    names, where = list(tensors), {}
    for index in range(files):
        file = f"model-{index + 1:05d}-of-{files:05d}.safetensors"
        mine = names[index::files]
        save_file({name: tensors[name].contiguous() for name in mine}, root / file)
        where |= dict.fromkeys(mine, file)
    (root / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
