"""One rank of inputs that other systems were seen to fail on, for RankPool.run."""

import torch
import torch.distributed as dist
from torch import Tensor

from moe_ops import dispatch
from moe_ops.dispatch import Experts
from moe_ops.parallel.weights import split_experts
from moe_ops.testing.dispatch_cases import DispatchCase


def _rank(group: dist.ProcessGroup, case: DispatchCase, **more):
    inputs, weights = case.build()
    experts = Experts(split_experts(weights, dist.get_rank(group), case.ranks))
    here = case.dispatcher(experts.weights, group, **more)
    return here, experts, case.own(inputs, dist.get_rank(group)) if here.reduces else inputs


def _finish(here, experts, state) -> Tensor:
    rows = here.pre_permute(state)
    return here.combine(here.post_permute(experts(rows), rows, state), state)


def run_padded_rows(group: dist.ProcessGroup, case: DispatchCase, real: int) -> tuple[int, bool, bool]:
    """(rows that the experts get, whether padding rows come back as 0, whether real ones are as without padding) when
    all rows behind the first `real` are the same token with ids of -1."""
    here, experts, (x, weights, ids) = _rank(group, case)
    padding = (torch.arange(len(x)) >= real)[:, None]
    x, ids = torch.where(padding, x[:1], x), torch.where(padding, -1, ids)
    rows = here.pre_permute(here.dispatch(x, weights, ids))
    label = rows.masked_m if rows.m_indices is None else rows.m_indices >= 0
    assert label is not None
    out = dispatch.run(here, experts, x, weights, ids)
    alone = dispatch.run(here, experts, x[:real], weights[:real], ids[:real])
    return int(label.sum()), not out[real:].any(), torch.equal(out[:real], alone)


def run_interleaved(group: dist.ProcessGroup, case: DispatchCase) -> list[bool]:
    """Two routings through one dispatcher, the second on its way before the first is back: whether each is as alone."""
    here, experts, (x, weights, ids) = _rank(group, case)
    batches = [(x, weights, ids), (x.flip(0), weights, ids.flip(1))]
    alone = [_finish(here, experts, here.dispatch(*batch)) for batch in batches]
    states = [here.dispatch(*batch) for batch in batches]
    return [torch.equal(_finish(here, experts, state), want) for state, want in zip(states, alone, strict=True)]


def run_untouched(group: dist.ProcessGroup, case: DispatchCase) -> list[bool]:
    """Whether each input has its storage and its bits after a call."""
    here, experts, batch = _rank(group, case)
    kept = [(t.clone(), t.data_ptr(), t.untyped_storage().nbytes()) for t in batch]
    dispatch.run(here, experts, *batch)
    now = zip(batch, kept, strict=True)
    return [torch.equal(t, a) and (t.data_ptr(), t.untyped_storage().nbytes()) == (b, c) for t, (a, b, c) in now]


def run_handover(group: dist.ProcessGroup, case: DispatchCase) -> tuple[torch.dtype, bool, tuple[int, ...]]:
    """(dtype of the rows that the experts read, whether scales lie beside them, the rows' shape)."""
    here, _, batch = _rank(group, case)
    rows = here.pre_permute(here.dispatch(*batch))
    return rows.x.dtype, rows.x_scale is not None and rows.x_scale.numel() > 0, tuple(rows.x.shape)


def run_compiled_empty(group: dist.ProcessGroup, case: DispatchCase) -> list[tuple[int, ...]]:
    """Shapes of compiled calls, one graph each without breaks: this rank's tokens, then none at all."""
    torch._dynamo.reset()
    here, experts, batch = _rank(group, case, captured=True)

    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.here, self.experts = here, experts

        def forward(self, *batch):
            return dispatch.run(self.here, self.experts, *batch)

    layer = torch.compile(Layer(), fullgraph=True, dynamic=True, backend="aot_eager")
    return [tuple(layer(*[t[:n].clone() for t in batch]).shape) for n in (len(batch[0]), 0)]
