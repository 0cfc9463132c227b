"""Other libraries' expert layers on the same weights and tokens, one file a peer. See peer.py for what a peer is."""

from moe_ops.bench.peers.deep_gemm_mega import DeepGemmMega
from moe_ops.bench.peers.deep_gemm_pair import ContiguousPair, MaskedPair, PsumPair
from moe_ops.bench.peers.peer import Peer
from moe_ops.bench.peers.torch_grouped_mm import TorchGroupedMM
from moe_ops.bench.peers.transformers_deepgemm import TransformersDeepGemm
from moe_ops.bench.peers.transformers_grouped_mm import TransformersGroupedMM

PEERS: tuple[type[Peer], ...] = (
    MaskedPair,
    PsumPair,
    ContiguousPair,
    DeepGemmMega,
    TransformersDeepGemm,
    TorchGroupedMM,
    TransformersGroupedMM,
)
"""In the order in which they run: the three pairs share compiled kernels, and compilers come last."""


def peers_of(recipe: str) -> list[type[Peer]]:
    """Those that read the weights of this recipe."""
    readers: dict[str, list[type[Peer]]] = {}
    for kind in PEERS:
        readers.setdefault(kind.recipe, []).append(kind)
    return readers.get(recipe, [])


__all__ = ["PEERS", "Peer", "peers_of"]
