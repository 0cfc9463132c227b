"""A residual stack of MoE layers: the smallest model in which layers share memory and follow one another."""

import torch
from torch import Tensor, nn

from moe_ops.layer import MoELayer
from moe_ops.prep import prepare_weights


def router_of(E: int, K: int, device: torch.device | str, seed: int = 0) -> Tensor:
    """(E, K) bf16, logits of about unit size."""
    generator = torch.Generator(device).manual_seed(1000 + seed)
    return torch.randn(E, K, dtype=torch.bfloat16, device=device, generator=generator) / K**0.5


class Stack(nn.Module):
    """x + layer(x), `layers` times.

    Args:
        recipes: one layer each.
        options: of MoELayer.
    """

    def __init__(
        self,
        *recipes: str,
        E: int,
        K: int,
        I: int,
        top_k: int,
        device: torch.device | str = "cpu",
        seed: int = 0,
        **options,
    ):
        super().__init__()
        generator = torch.Generator(device).manual_seed(seed)

        def normal(*sizes: int) -> Tensor:
            made = torch.randn(*sizes, dtype=torch.bfloat16, device=device, generator=generator)
            return made / sizes[-1] ** 0.5

        self.K, self.device = K, torch.device(device)
        self.layers = nn.ModuleList()
        for recipe in recipes:
            weights = prepare_weights(normal(E, 2 * I, K), normal(E, K, I), recipe=recipe)
            self.layers.append(MoELayer(normal(E, K), weights, top_k=top_k, **options))

    def forward(self, x: Tensor, num_token_non_padded: Tensor | None = None) -> Tensor:
        """(T, K) -> (T, K)."""
        for layer in self.layers:
            x = x + layer(x, num_token_non_padded=num_token_non_padded)
        return x

    def hidden(self, T: int, seed: int = 0) -> Tensor:
        """(T, K) bf16."""
        generator = torch.Generator(self.device).manual_seed(seed)
        return torch.randn(T, self.K, dtype=torch.bfloat16, device=self.device, generator=generator)
