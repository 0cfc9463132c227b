"""Dispatch formats: how tokens reach their experts on other ranks and come back. One class a format, one table."""

from moe_ops import check
from moe_ops.dispatch.base import Dispatcher, refusal
from moe_ops.dispatch.deepep_ll import DeepEPLowLatency
from moe_ops.dispatch.deepep_normal import DeepEPNormal
from moe_ops.dispatch.deepep_v2 import DeepEPV2, DeepEPV2Expanded, DeepEPV2Masked
from moe_ops.dispatch.experts import ExpertRows, Experts
from moe_ops.dispatch.flashinfer import FlashInfer
from moe_ops.dispatch.overlap import Overlap, run_in_parts
from moe_ops.dispatch.setup import ExpertSetup
from moe_ops.dispatch.standard import Standard
from moe_ops.dispatch.tokens import TokenDispatcher
from moe_ops.dispatch.transport import Transport
from moe_ops.dispatch.transport_deep_ep import DeepEPTransport
from moe_ops.dispatch.transport_low_latency import MooncakeTransport, NixlTransport
from moe_ops.dispatch.transport_torch import TorchTransport

FORMATS: dict[str, type[Dispatcher]] = {
    form.name: form
    for form in (
        Standard,
        FlashInfer,
        DeepEPLowLatency,
        DeepEPNormal,
        DeepEPV2,
        DeepEPV2Expanded,
        DeepEPV2Masked,
    )
}


def create(
    name: str, setup: ExpertSetup, transport: Transport, *, layout: str = "auto", captured: bool = False
) -> Dispatcher:
    """The dispatcher of a format.

    Args:
        name: one of FORMATS.
        setup, transport: see Dispatcher.
        layout: for standard and flashinfer, which can feed both; the others have one each.
        captured: whether a CUDA graph or a fullgraph compile will hold it.

    Raises:
        ValueError: a size or a layout that the format cannot have; a format with host counts that is to be captured.
    """
    check.one_of("dispatch", "format", name, tuple(FORMATS))
    form = FORMATS[name]
    if captured and form.needs_host_counts:
        raise ValueError(refusal(name))
    if issubclass(form, TokenDispatcher):
        return form(setup, transport, layout)
    check.one_of(f"dispatch {name}", "layout", layout, ("auto", *form.layouts), "That is what this format feeds.")
    return form(setup, transport)


def run(
    dispatcher: Dispatcher, experts: Experts, hidden_states, topk_weights, topk_ids, *, overlap: Overlap | None = None
):
    """One rank's tokens through all ranks' experts: (T, K), or this rank's part of the sum for standard.

    Where a format hands over plain tokens, moe::fused_deepgemm takes the place of the three stages between dispatch
    and combine; the bits are the same. overlap: in parts, with the bits of the parts one by one.
    """
    batch = (hidden_states, topk_weights, topk_ids)
    if overlap is not None:
        return run_in_parts(dispatcher, experts, _between, overlap, *batch)
    state = dispatcher.dispatch(*batch)
    return dispatcher.combine(_between(dispatcher, experts, state), state)


def _between(dispatcher: Dispatcher, experts: Experts, state):
    """From what dispatch returned to what combine takes."""
    if not isinstance(dispatcher, TokenDispatcher):
        return run_stages(dispatcher, experts, state)
    return experts.on_tokens(
        state.hidden_states,
        state.topk_weights,
        state.topk_ids,
        expert_start=dispatcher.local_experts.start,
        num_experts=dispatcher.setup.num_experts,
        routed_scaling_factor=dispatcher.setup.routed_scaling_factor,
        layout=dispatcher.layout,
    )


def run_stages(dispatcher: Dispatcher, experts: Experts, state):
    """pre_permute, experts and post_permute, stage by stage, on what dispatch returned."""
    rows = dispatcher.pre_permute(state)
    return dispatcher.post_permute(experts(rows), rows, state, experts.weights.w2_bias)


__all__ = [
    "FORMATS",
    "DeepEPTransport",
    "Dispatcher",
    "ExpertRows",
    "ExpertSetup",
    "Experts",
    "MooncakeTransport",
    "NixlTransport",
    "Overlap",
    "TokenDispatcher",
    "TorchTransport",
    "Transport",
    "create",
    "run",
    "run_stages",
]
