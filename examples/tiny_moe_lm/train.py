"""Train the checkpoint: `python examples/tiny_moe_lm/train.py` (about ten minutes, two cores).

The `moe_ops` operators are for inference and refuse gradients, so the experts here are plain
differentiable torch with the same routing and the same weight layout.
"""

from __future__ import annotations

import argparse
import math
import platform
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tiny_moe_lm import corpus
from tiny_moe_lm.model import CHECKPOINT, Config, TinyMoELM, save_checkpoint

SEED = 1234
BATCH = 16
PEAK_RATE = 4e-3
WARMUP_STEPS = 100
BALANCE_WEIGHT = 0.01


class TrainableExperts(nn.Module):
    """Differentiable experts; `balance_loss` holds the load-balance term of the last forward."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.topk = config.topk
        self.w13 = nn.Parameter(torch.empty(config.experts, 2 * config.intermediate, config.hidden))
        self.w2 = nn.Parameter(torch.empty(config.experts, config.hidden, config.intermediate))
        self.balance_loss = torch.zeros(())

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        """x (T, K) float32 and router logits (T, E) float32 to (T, K) float32."""
        scores = logits.softmax(dim=-1)
        weights, ids = scores.topk(self.topk, dim=-1)
        weights = weights / weights.sum(dim=-1, keepdim=True)

        experts = self.w13.shape[0]
        counts = ids.flatten().bincount(minlength=experts)
        # Share of assignments times mean score, summed over experts: 1 when both are uniform.
        share = counts / ids.numel()
        self.balance_loss = experts * torch.dot(share, scores.mean(dim=0))

        # Rows in order of expert make each expert one dense product.
        order = ids.flatten().argsort(stable=True)
        token = order // self.topk
        outputs = [
            F.linear(_swiglu(F.linear(rows, w13)), w2)
            for rows, w13, w2 in zip(x[token].split(counts.tolist()), self.w13, self.w2, strict=True)
        ]
        weighted = torch.cat(outputs) * weights.flatten()[order, None]
        return torch.zeros_like(x).index_add(0, token, weighted)


def _swiglu(gate_up: Tensor) -> Tensor:
    """(T, 2I) gate columns before up columns to (T, I)."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def build(config: Config) -> TinyMoELM:
    """A float32 decoder with trainable experts, every matrix drawn at 1 / sqrt(fan in)."""
    model = TinyMoELM(config, lambda layer: TrainableExperts(config))
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1:
            # The embedding is looked up, not multiplied: its rows start small and equal in scale.
            scale = 0.5 if name.startswith("embedding") else parameter.shape[-1] ** -0.5
            # Layers that write to the residual stream share its variance between them.
            if name.endswith(("out.weight", "w2")):
                scale /= math.sqrt(2 * config.layers)
            nn.init.normal_(parameter, std=scale)
    return model


def bits_per_byte(model: TinyMoELM, chunks: Tensor) -> float:
    """Mean bits per byte over chunks (count, length + 1) int64."""
    with torch.no_grad():
        logits = model(chunks[:, :-1], torch.zeros((), dtype=torch.int64))
        loss = F.cross_entropy(logits.flatten(0, 1), chunks[:, 1:].flatten())
    return loss.item() / math.log(2)


def rate_at(step: int, steps: int) -> float:
    """Linear warm-up, then a cosine to 2 % of the peak rate."""
    if step < WARMUP_STEPS:
        return PEAK_RATE * (step + 1) / WARMUP_STEPS
    progress = (step - WARMUP_STEPS) / max(1, steps - WARMUP_STEPS)
    return PEAK_RATE * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * progress)))


def train(steps: int) -> tuple[TinyMoELM, float]:
    """Train for `steps` batches; returns the model and its held-back bits per byte."""
    torch.manual_seed(SEED)
    config = Config()
    model = build(config)
    text, held_back = corpus.train_bytes(), corpus.held_back_chunks(length=config.context)
    print(f"{text.numel() / 1e6:.1f} MB of training text, {held_back.numel()} held-back bytes")

    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=PEAK_RATE, betas=(0.9, 0.95))

    start = torch.zeros((), dtype=torch.int64)
    window = torch.arange(config.context + 1)
    began = time.perf_counter()
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = rate_at(step, steps)
        offsets = torch.randint(text.numel() - config.context - 1, (BATCH, 1))
        batch = text[offsets + window].long()
        logits = model(batch[:, :-1], start)
        loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        balance = sum(block.experts.balance_loss for block in model.blocks) / config.layers
        (loss + BALANCE_WEIGHT * balance).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 100 == 99 or step == steps - 1:
            print(
                f"step {step + 1:5d}/{steps}  train {loss.item() / math.log(2):.3f} bits/byte  "
                f"balance {balance.item():.3f}  {time.perf_counter() - began:.0f} s",
                flush=True,
            )
    return model, bits_per_byte(model, held_back)


def main() -> None:
    """Train and write the checkpoint."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=CHECKPOINT)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    model, held_back = train(arguments.steps)
    notes = {"held_back_bits_per_byte": f"{held_back:.4f}", "python": platform.python_version()}
    save_checkpoint(model, arguments.out, notes)
    size = arguments.out.stat().st_size / 1e6
    print(f"held-back {held_back:.3f} bits/byte; wrote {arguments.out.name}, {size:.2f} MB")


if __name__ == "__main__":
    main()
