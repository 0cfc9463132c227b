"""ExpertSetup: what the ranks of an expert-parallel group agree on before the first token."""

from dataclasses import dataclass

from moe_ops import check
from moe_ops.meta.pre_permute import IDS
from moe_ops.prep import MoEWeights
from moe_ops.recipes import FLOATS, Recipe, get_recipe

PAYLOADS = ("auto", "bf16", "fp8")
_OP = "ExpertSetup"


@dataclass(frozen=True)
class ExpertSetup:
    """The same on every rank: a rank that disagrees would cut the bytes of the others in the wrong places."""

    num_experts: int
    """Of all ranks together. Rank r holds [r * num_experts / ranks, (r + 1) * num_experts / ranks)."""
    top_k: int
    K: int
    """Hidden size that the experts read, padding included (MoEWeights.K)."""
    recipe: str
    scale_format: str
    max_tokens: int | None = None
    """Most tokens that one rank brings: the static capacity of the formats that need no host counts."""
    payload: str = "auto"
    """How hidden states travel: bf16, fp8 with scales, or auto: fp8 where the recipe and the format have it."""
    routed_scaling_factor: float = 1.0

    def __post_init__(self) -> None:
        row = get_recipe(_OP, self.recipe, self.scale_format)
        sizes = (("num_experts", self.num_experts), ("top_k", self.top_k), ("K", self.K))
        for name, size in (*sizes, ("max_tokens", 1 if self.max_tokens is None else self.max_tokens)):
            check.value(isinstance(size, int) and size >= 1, _OP, name, "an integer >= 1", size, "Check it.")
        check.multiple(_OP, "K", self.K, row.granule, "Pass MoEWeights.K, and tokens padded by pad_hidden.")
        check.one_of(_OP, "payload", self.payload, PAYLOADS)

    @classmethod
    def of(cls, weights: MoEWeights, *, ranks: int, top_k: int, **more) -> "ExpertSetup":
        """From one rank's prepared weights: E experts on each of `ranks` ranks. `more`: the remaining fields."""
        form = dict(recipe=weights.recipe, scale_format=weights.scale_format)
        return cls(num_experts=ranks * weights.E, top_k=top_k, K=weights.K, **form, **more)

    @property
    def row(self) -> Recipe:
        return get_recipe(_OP, self.recipe)

    def local_experts(self, rank: int, ranks: int) -> range:
        """The global ids of the experts on one of `ranks` ranks.

        Raises:
            ValueError: the experts do not divide by the ranks.
        """
        check.multiple(_OP, "num_experts", self.num_experts, ranks, "Choose a number of ranks that divides it.")
        each = self.num_experts // ranks
        return range(rank * each, (rank + 1) * each)

    def check_tokens(self, op: str, hidden_states, topk_weights, topk_ids, *, capacity: bool) -> None:
        """Checks one rank's tokens: shapes, dtypes, devices, and with `capacity` that they fit max_tokens.

        Raises:
            ValueError, TypeError: one of them does not fit.
        """
        tensors = (hidden_states, topk_weights, topk_ids)
        fits = (
            hidden_states.dim() == 2
            and hidden_states.shape[1] == self.K
            and topk_weights.shape == topk_ids.shape == (hidden_states.shape[0], self.top_k)
            and hidden_states.dtype in FLOATS
            and topk_weights.dtype in FLOATS
            and topk_ids.dtype in IDS
            and all(tensor.device == hidden_states.device for tensor in tensors)
            and not (capacity and hidden_states.shape[0] > self.max_tokens)
        )
        if not fits:  # Dynamo traces the comparisons above, not the sentences below
            self._explain(op, *tensors)

    def _explain(self, op: str, hidden_states, topk_weights, topk_ids) -> None:
        got = tuple(hidden_states.shape)
        fix = "Flatten batch and sequence into tokens."
        check.value(len(got) == 2, op, "hidden_states", "of shape (T, K)", got, fix)
        T = got[0]
        check.shape(op, "hidden_states", hidden_states, (T, self.K), "(T, K)", "Pad it with MoEWeights.pad_hidden.")
        check.dtype(op, "hidden_states", hidden_states, FLOATS, "Cast them first.")
        check.shape(op, "topk_ids", topk_ids, (T, self.top_k), "(T, top_k)", "One row per token.")
        check.dtype(op, "topk_ids", topk_ids, IDS, "Use topk_ids.int().")
        check.shape(op, "topk_weights", topk_weights, (T, self.top_k), "(T, top_k)", "One weight per route.")
        check.dtype(op, "topk_weights", topk_weights, FLOATS, "Use topk_weights.float().")
        check.same_device(op, hidden_states.device, topk_weights=topk_weights, topk_ids=topk_ids)
        rule = f"of at most max_tokens={self.max_tokens} tokens"
        check.value(False, op, "hidden_states", rule, T, "Raise max_tokens on every rank, or split the batch.")
