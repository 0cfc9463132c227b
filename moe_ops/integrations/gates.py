"""Which formula of silu_and_quant a model's gate is: found by running it, never by its name.

A gate is taken for a formula only if both give the same values on a grid that covers every bend of the formula. What
matches none runs as the model wrote it, between two grouped GEMMs (through_gate.py).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from moe_ops.integrations.modules import ExpertsModule
from moe_ops.reference.silu_and_quant import gated


@dataclass(frozen=True)
class Formula:
    """A candidate: the activation, and where models keep its constants."""

    activation: str = "silu"
    swiglu_limit: tuple[str, ...] = ()
    gemm1_alpha: tuple[str, ...] = ()
    gemm1_clamp_limit: tuple[str, ...] = ()

    def constants(self, module: ExpertsModule) -> dict[str, float] | None:
        """The arguments that this formula needs, or None where the model lacks one."""
        wanted = {name: getattr(self, name) for name in ("swiglu_limit", "gemm1_alpha", "gemm1_clamp_limit")}
        found = {name: _number(module, names) for name, names in wanted.items() if names}
        return None if None in found.values() else {k: v for k, v in found.items() if v is not None}


_LIMIT, _ALPHA = ("swiglu_limit", "limit"), ("swiglu_alpha", "alpha")

FORMULAS = (
    Formula(),
    Formula(swiglu_limit=_LIMIT),
    Formula(gemm1_alpha=_ALPHA),
    Formula(gemm1_alpha=_ALPHA, gemm1_clamp_limit=_LIMIT),
    Formula("situ", gemm1_alpha=("mlp_gate_softcap",), gemm1_clamp_limit=("mlp_up_softcap",)),
)


def recognise(module: ExpertsModule, I: int, device: torch.device) -> dict[str, str | float] | None:
    """The arguments of fused_deepgemm that make the gate of this experts module, or None: no formula is it.

    I: the module's intermediate size. The gate runs once, in float32, on `device`.
    """
    candidates = [(row, row.constants(module)) for row in FORMULAS]
    bends = {value for _, constants in candidates for value in (constants or {}).values()}
    gate, up = _grid(bends, I, device)
    lay = interleave if not module.is_concatenated else lambda *halves: torch.cat(halves, -1)
    got = module._apply_gate(lay(gate, up))
    for row, constants in candidates:
        if constants is None:
            continue
        arguments = dict.fromkeys(("swiglu_limit", "gemm1_alpha", "gemm1_clamp_limit")) | constants
        want = gated(gate, up, activation=row.activation, **arguments)
        if got.shape == want.shape and torch.allclose(got.float(), want, rtol=1e-5, atol=1e-6):
            return {"activation": row.activation, **constants}
    return None


def interleave(gate: Tensor, up: Tensor) -> Tensor:
    """(..., I) twice -> (..., 2 I), columns taking turns."""
    return torch.stack((gate, up), -1).flatten(-2)


def _number(module: ExpertsModule, names: tuple[str, ...]) -> float | None:
    """The first positive number of these names, on the module or in its config."""
    values = (getattr(owner, name, None) for owner in (module, module.config) for name in names)
    return next((float(v) for v in values if isinstance(v, int | float) and v > 0), None)


def _grid(bends: set[float], I: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """All pairs of points on either side of 0 and of each constant, as gate and up (rows, I)."""
    points = torch.linspace(-12, 12, 33, device=device)
    for bend in bends:
        points = torch.cat((points, bend * torch.linspace(-2, 2, 9, device=device)))
    pairs = torch.cartesian_prod(points, points)
    rows = -(-len(pairs) // I)
    pairs = pairs.repeat(-(-rows * I // len(pairs)), 1)[: rows * I]
    gate, up = pairs.unbind(1)
    return gate.reshape(rows, I).contiguous(), up.reshape(rows, I).contiguous()
