"""MoEWeights: the prepared experts of one layer, with what they were prepared for."""

from dataclasses import dataclass, fields

import torch.nn.functional as F
from torch import Tensor

from moe_ops import check
from moe_ops.meta.grouped_gemm import check_format, check_weight
from moe_ops.meta.silu_and_quant import check_bias
from moe_ops.prep.report import Padding, PrepReport
from moe_ops.recipes import get_recipe
from moe_ops.weight_format import FORMATS

_TENSORS = ("w13", "w13_scale", "w2", "w2_scale", "w13_bias", "w2_bias")


@dataclass(frozen=True, eq=False)
class MoEWeights:
    """Prepared experts. Checked on creation, so that an error shows at load and not in the first forward."""

    w13: Tensor
    """(E, 2 I, K), gate rows over up rows; (E, 2 I, K / 2) int8 for mxfp4."""
    w13_scale: Tensor | None
    """(E, 2 I / 128, K / 128) fp32, or UE8M0 (E, 2 I, words) int32 MN-major; None for bf16."""
    w2: Tensor
    """(E, K, I); (E, K, I / 2) int8 for mxfp4."""
    w2_scale: Tensor | None
    recipe: str
    scale_format: str
    """none, fp32 or ue8m0: of the weights, and so of the activations that meet them."""
    w13_bias: Tensor | None = None
    """(E, 2 I) float."""
    w2_bias: Tensor | None = None
    """(E, K) float."""
    padding: Padding = Padding()
    """Zeros that K and I above count: the model's sizes are K - padding.K and I - padding.I."""
    report: PrepReport | None = None
    """What preparation did; None for weights that were put together by hand."""
    weight_format: str = "natural"
    """How w13 and w2 are stored: weight_format.FORMATS."""
    fp8: "MoEWeights | None" = None
    """Repacked weights once more as fp8 blocks, for calls with many rows an expert."""

    def __post_init__(self) -> None:
        op = "MoEWeights"
        row = get_recipe(op, self.recipe, self.scale_format)
        form = check_format(op, self.weight_format, row)
        axes = "4 axes (E, K / 64, N, 32)" if form.repacked else "3 axes (E, N, K)"
        for name in ("w13", "w2"):
            got = getattr(self, name).dim()
            check.value(got == int(axes[0]), op, name, f"of {axes}", f"{got} axes", "Stack the experts.")
        E, I, K = self.E, self.I, self.K
        for name, shape, letters in (("w13", (E, 2 * I, K), "(E, 2 I, K)"), ("w2", (E, K, I), "(E, K, I)")):
            tensors = getattr(self, name), getattr(self, f"{name}_scale")
            got = check_weight(op, name, *tensors, shape, letters, row, self.weight_format)
            fix = "Use moe_ops.prepare_weights."
            check.value(got == self.scale_format, op, f"{name}_scale", f"in format {self.scale_format}", got, fix)
        check_bias(op, "w13_bias", self.w13_bias, (E, 2 * I), "(E, 2 I)")
        check_bias(op, "w2_bias", self.w2_bias, (E, K), "(E, K)")
        if self.fp8 is not None:
            got = (self.fp8.E, self.fp8.I, self.fp8.K, self.fp8.recipe, self.fp8.scale_format)
            want = (E, I, K, "fp8_block", "fp32")
            check.value(form.repacked, op, "fp8", "None for natural weights", "weights", "Use moe_ops.repack_weights.")
            check.value(got == want, op, "fp8", f"of {want}", got, "Use moe_ops.repack_weights.")
        check.same_device(op, self.w13.device, **self.tensors())

    @property
    def E(self) -> int:
        """Experts."""
        return self._sizes[0]

    @property
    def K(self) -> int:
        """Hidden size, padding included: what fused_deepgemm reads and returns."""
        return self._sizes[1]

    @property
    def I(self) -> int:
        """Intermediate size, padding included."""
        return self._sizes[2]

    @property
    def _sizes(self) -> tuple[int, int, int]:
        return FORMATS[self.weight_format].sizes(self.w2, get_recipe("MoEWeights", self.recipe).w_pack)

    def tensors(self) -> dict[str, Tensor | None]:
        """The tensor fields, by the names that moe::fused_deepgemm gives them."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        own = {name: value for name, value in values.items() if name in _TENSORS}
        if self.fp8 is None:
            return own
        copy = self.fp8.tensors()
        return own | {f"{w}_fp8{end}": copy[f"{w}{end}"] for w in ("w13", "w2") for end in ("", "_scale")}

    def attributes(self) -> dict[str, str]:
        """What moe::fused_deepgemm must be told of the tensors: recipe, and how they are stored."""
        return dict(recipe=self.recipe, weight_format=self.weight_format)

    def pad_hidden(self, hidden_states: Tensor) -> Tensor:
        """(..., K - padding.K) -> (..., K): zeros for fused_deepgemm to read. The same tensor without padding."""
        return F.pad(hidden_states, (0, self.padding.K)) if self.padding.K else hidden_states

    def cut_hidden(self, out: Tensor) -> Tensor:
        """(..., K) -> (..., K - padding.K): undoes pad_hidden on the result. A view."""
        return out[..., : self.K - self.padding.K]
