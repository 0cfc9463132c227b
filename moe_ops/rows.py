"""How many rows a grouped GEMM sees, and which layout holds them.

Every function takes plain ints and traced sizes alike: `//`, `+`, `*` and `torch.sym_max / sym_min` only, so a
compiled graph serves every token count.
"""

import torch

BLOCK = 128
"""Rows of one GEMM block. Each expert's rows start on a multiple of it, in both layouts."""

LAYOUTS = ("auto", "contiguous", "masked")

MASKED_TOKENS = (2, 128)
"""First and last token count for which `auto` takes the masked layout.

On one H200 (torch 2.11, fp8 blocks) the masked GEMM pair is the faster one from a few tokens to about a hundred
(T=8: 87 against 119 us at E128 K2048 I768; T=64: 369 against 460 us at E32 K7168 I2048), the contiguous pair at
one token on narrow shapes and from a few hundred tokens on wide ones. The bound also keeps slabs small.
"""


def ceil_div(a, b):
    return (a + b - 1) // b


def align(a, b):
    return ceil_div(a, b) * b


def contiguous_rows(T, top_k: int, E: int):
    """Rows of the contiguous layout in the worst case over all routings of T tokens: exact, not a guess.

    The worst routing touches as many experts as it can with one
    row each (one block apiece) and fills further blocks with the rest, until every expert has all T tokens.
    """
    routes = T * top_k
    touched = torch.sym_min(routes, E)
    return torch.sym_min(touched + (routes - touched) // BLOCK, E * ceil_div(T, BLOCK)) * BLOCK


def masked_rows(T):
    """Rows of one expert's slab: every token may choose the same expert, and chooses it once."""
    return align(T, BLOCK)


AUTO_RULE = f"auto: masked for {MASKED_TOKENS[0]} <= T <= {MASKED_TOKENS[1]}, else contiguous"


def choose_layout(T: int) -> str:
    """The layout that `auto` means for T tokens: AUTO_RULE."""
    first, last = MASKED_TOKENS
    return "masked" if first <= T <= last else "contiguous"
