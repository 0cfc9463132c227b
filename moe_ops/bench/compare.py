"""One row of another library's layer, beside this package's."""

from dataclasses import asdict, dataclass

import torch

from moe_ops.bench.cases import Case
from moe_ops.bench.layer import one_line
from moe_ops.bench.peers import Peer
from moe_ops.bench.timing import Effort, Times, recorded
from moe_ops.testing import relative_error


@dataclass(frozen=True)
class PeerRow:
    """Microseconds of one call of a peer, or the reason why there is none."""

    peer: str
    shape: str
    T: int
    recipe: str
    whole: bool
    """False: its two GEMMs alone."""
    us: float | None = None
    p20: float | None = None
    p80: float | None = None
    burst_us: float | None = None
    error: float | None = None
    """As of this package's rows; no peer is held to a bound."""
    reason: str | None = None

    def asdict(self) -> dict:
        return asdict(self)


def time_peer(kind: type[Peer], case: Case, effort: Effort) -> PeerRow:
    """Never raises: what goes wrong in a peer is its row."""
    head = (kind.name, case.shape.name, case.T, kind.recipe, kind.whole)
    try:
        peer = kind(case)
        reason = peer.why_not()
        if reason is not None:
            return PeerRow(*head, reason=reason)
        with torch.no_grad():
            peer.prepare()
            recording = recorded(peer.run, case.device)
            times, burst = recording.times(effort), recording.burst(effort)
            error = relative_error(case.of_checked(peer.finish(recording.result)), case.expected)
        return PeerRow(*head, times.us, times.p20, times.p80, Times.us_of(burst), error)
    except Exception as error:  # another library may raise anything
        return PeerRow(*head, reason=one_line(error))
