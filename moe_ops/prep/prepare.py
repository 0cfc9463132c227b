"""prepare_weights: a layer's stacked experts, float or quantised, to MoEWeights."""

import torch
from torch import Tensor

from moe_ops import check
from moe_ops.prep.builder import Builder
from moe_ops.prep.decide import decide
from moe_ops.prep.source import BLOCK, CODES, E4M3, SCALE_DTYPES, Source, exponents, finite, pack_of
from moe_ops.prep.source import scale_shape as plain_shape
from moe_ops.prep.weights import MoEWeights
from moe_ops.recipes import FLOATS

_OP = "prepare_weights"


@torch.no_grad()  # parameters may be given: what is prepared has no history
def prepare_weights(
    w13: Tensor,
    w2: Tensor,
    *,
    recipe: str | None = None,
    scale_format: str | None = None,
    w13_scale: Tensor | None = None,
    w2_scale: Tensor | None = None,
    w13_bias: Tensor | None = None,
    w2_bias: Tensor | None = None,
    source: str | None = None,
    block: tuple[int, int] = BLOCK,
    arch: str | None = None,
    backend: str = "auto",
    on_inexact: str = "raise",
) -> MoEWeights:
    """Brings experts into a recipe's form for fused_deepgemm, by the path that prep.decide names. Inputs stay as they
    are. K and I that the recipe's groups do not divide are padded with zeros, gate and up rows each on their own; the
    result's `padding` says by how much and `report` what was done and what error it added.

    Args:
        w13: (E, 2 I, K), gate rows over up rows. Float (bf16, fp16, fp32), float8_e4m3fn, or MXFP4 codes
            (E, 2 I, K / 2) int8, uint8 or float4_e2m1fn_x2, low nibble = even column.
        w2: (E, K, I), likewise.
        recipe: bf16, fp8_block, mxfp8 or mxfp4. None: the source's own kind; fp8_block for MXFP4 on Hopper.
        scale_format: fp32 or ue8m0. None: what the device's GEMMs read (fp8_block: fp32 on CPU and Hopper, ue8m0 from
            Blackwell on); the MX recipes are ue8m0 always.
        w13_scale, w2_scale: of quantised weights, in plain form; (N, K) of one expert's w13 half or w2:
            fp8_block (E, rows, ceil(K / 128)) with ceil(N / 128) rows for w2, and as many for each half of w13;
            mxfp4, mxfp8 (E, N, K / 32) exponent bytes (uint8, float8_e8m0fnu) or fp32 powers of two;
            fp8_tensor (E,), or (E, 2) for w13 whose halves have one each; fp8_channel (E, N) or (E, N, 1).
        w13_bias, w2_bias: (E, 2 I) and (E, K) float; padded, otherwise kept.
        source: kind of the weights (prep.source.SOURCES). None: told from dtypes and the shape of w13_scale.
        block: (rows, columns) that share a scale in an fp8_block source.
        arch, backend: what will run the weights, when it is not the device they are on; see prep.decide.
        on_inexact: for MXFP4 as fp8 blocks, raise or warn if a 128 x 128 tile cannot be held exactly.

    Raises:
        ValueError: shapes disagree, a float weight is not finite, a scale is missing, NaN, or an fp32 MX scale that is
            no power of two; tiles that would round. TypeError: a dtype that no source has. NotImplementedError: the
            backend cannot run the form.
    """
    for name, w in (("w13", w13), ("w2", w2)):
        check.value(w.dim() == 3, _OP, name, "of 3 axes (E, N, K)", lambda w=w: tuple(w.shape), "Stack the experts.")
        check.dtype(_OP, name, w, (*FLOATS, E4M3, *CODES), "Weights come in these.")
    kind = source or _kind(w13, w13_scale)
    path = decide(kind, recipe=recipe, scale_format=scale_format, device=arch or w13.device, backend=backend, op=_OP)
    pack = pack_of(kind)
    E, I, K = w13.shape[0], w2.shape[2] * pack, w2.shape[1]
    check.shape(_OP, "w13", w13, (E, 2 * I, -(-K // pack)), "(E, 2 I, K)", "E, I and K are those of w2.")
    check.value(w2.shape[0] == E, _OP, "w2", f"of E={E} experts", w2.shape[0], "As many as w13 has.")
    gate, up = _scales("w13_scale", w13_scale, kind, (E, I, K), block, halves=2)
    (down,) = _scales("w2_scale", w2_scale, kind, (E, K, I), block, halves=1)
    scales = {"gate": gate, "up": up, "down": down}
    values = {"gate": w13[:, :I], "up": w13[:, I:], "down": w2}
    builder = Builder(_OP, path, E=E, I=I, K=K, device=w13.device, on_inexact=on_inexact)
    for expert in range(E):
        for part, scale in scales.items():
            one = None if scale is None else scale[expert]
            builder.put(expert, part, Source(kind, values[part][expert], one, block))
    biases = (None if bias is None else bias.detach() for bias in (w13_bias, w2_bias))
    return builder.finish(*biases)


def _kind(w13: Tensor, scale: Tensor | None) -> str:
    """The kind of source, from dtypes and the shape of w13's scale."""
    if w13.dtype in FLOATS:
        return "float"
    if w13.dtype in CODES:
        return "mxfp4"
    scale = check.given(_OP, "w13_scale", scale, "beside quantised weights")
    E, N, K = w13.shape
    shape = tuple(scale.shape)
    if shape in ((E, N), (E, N, 1)):
        return "fp8_channel"
    if shape in ((E,), (E, 1), (E, 1, 1), (E, 2)):
        return "fp8_tensor"
    return "mxfp8" if shape == (E, *plain_shape("mxfp8", N, K)) else "fp8_block"


def _scales(
    name: str, scale: Tensor | None, kind: str, sizes: tuple[int, int, int], block: tuple[int, int], *, halves: int
) -> list[Tensor | None]:
    """Checked scales (E, ...) of each half of w13, or of w2 as one. sizes: E, and N and K of a half."""
    if kind == "float":
        check.value(scale is None, _OP, name, "None for float weights", "a tensor", "Drop it.")
        return [None] * halves
    scale = check.given(_OP, name, scale, "beside quantised weights")
    check.dtype(_OP, name, scale, SCALE_DTYPES[kind], f"Scales of {kind} come in these.")
    read = exponents if kind in ("mxfp4", "mxfp8") else finite
    E, N, K = sizes
    if kind == "fp8_tensor":
        if halves == 2 and tuple(scale.shape) == (E, 2):
            return list(read(_OP, name, scale).unbind(1))
        scale = scale.reshape(-1)
        check.shape(_OP, name, scale, (E,), "(E,)", "One scale an expert; w13 may have (E, 2).")
        return [read(_OP, name, scale)] * halves
    if kind == "fp8_channel" and scale.dim() == 2:
        scale = scale[..., None]
    rows, columns = plain_shape(kind, N, K, block)
    fix = "Each half of w13 has its own rows of scales."
    check.shape(_OP, name, scale, (E, halves * rows, columns), f"(E, rows, groups) of {kind}", fix)
    return list(read(_OP, name, scale).chunk(halves, 1))
