"""A decode loop in fixed memory: one workspace for all layers, warmed up, captured in CUDA graphs, replayed.

    python examples/03_decode_graphs.py

On a CPU the same lines run without graphs, in seconds. With a CUDA card they run there, captured, in the sizes of
Qwen3-30B-A3B's layers: nothing to change. Every step is compared with the plain model.
"""

import torch
from torch import nn

import moe_ops

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LAYERS, E, K, I, TOP_K = (8, 128, 2048, 768, 8) if DEVICE == "cuda" else (2, 8, 256, 128, 2)
BUCKETS = (1, 2, 4, 8, 16)


class Model(nn.Module):
    """Residual MoE layers. num_token_non_padded is what GraphedDecode says of padding; routers want to know."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(self._layer() for _ in range(LAYERS))

    def forward(self, x, num_token_non_padded=None):
        for layer in self.layers:
            x = x + layer(x, num_token_non_padded=num_token_non_padded)
        return x

    def _layer(self):
        def normal(*sizes):
            return torch.randn(*sizes, dtype=torch.bfloat16, device=DEVICE) / sizes[-1] ** 0.5

        weights = moe_ops.prepare_weights(normal(E, 2 * I, K), normal(E, K, I), recipe="fp8_block")
        return moe_ops.MoELayer(normal(E, K), weights, top_k=TOP_K)


def hidden(tokens):
    return torch.randn(tokens, K, dtype=torch.bfloat16, device=DEVICE)


@torch.inference_mode()
def main() -> None:
    torch.manual_seed(0)
    model = Model()

    workspace = moe_ops.share_workspace(model, max_tokens=max(BUCKETS))
    print(f"{LAYERS} layers share {workspace.nbytes / 2**20:.2f} MiB of scratch memory")

    print(moe_ops.warmup(model, tokens=BUCKETS, workers=0))

    mode = "graph" if DEVICE == "cuda" else "eager"
    decode = moe_ops.GraphedDecode(model, [hidden(1)], buckets=BUCKETS, mode=mode)
    print(decode)

    for tokens in (1, 3, 16, 7):
        x = hidden(tokens)
        got, want = decode(x), model(x)
        error = float((got - want).float().norm() / want.float().norm())
        print(
            f"{tokens:3} tokens in the bucket of {decode.bucket(tokens):2}: differs from the plain model by {error:.1e}"
        )
        assert error <= 1e-2

    moe_ops.report()


if __name__ == "__main__":
    main()
