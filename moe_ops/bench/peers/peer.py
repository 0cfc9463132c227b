"""What the benchmark asks of another library's layer."""

from abc import ABC, abstractmethod
from typing import ClassVar

from torch import Tensor

from moe_ops.bench.cases import Case


class Peer(ABC):
    """One case in another library. Made for it, asked why_not, prepared, and then run again and again."""

    name: ClassVar[str]
    recipe: ClassVar[str]
    """Whose weights it reads: a name in RECIPES."""
    whole: ClassVar[bool] = True
    """False: the two GEMMs alone, on rows that are ready."""

    def __init__(self, case: Case):
        self.case = case

    @abstractmethod
    def why_not(self) -> str | None:
        """Why it cannot run this case here, or None."""

    @abstractmethod
    def prepare(self) -> None:
        """Everything that is done once: weights in its own form, compilation, buffers."""

    @abstractmethod
    def run(self) -> Tensor:
        """What is timed. Without host syncs: it is captured in a graph."""

    def finish(self, result: Tensor) -> Tensor:
        """(T, K) from what `run` returned; not timed."""
        return result
