"""A transformers model whose experts run in moe_ops: eager, prepared for fp8, compiled.

    python examples/06_transformers.py

It runs on a CPU in under a minute, on a small random model. On a GPU, with a real checkpoint, change MODEL and DEVICE:

    MODEL, DEVICE = "Qwen/Qwen3-30B-A3B", "cuda"

and let `generate` compile each decoding step with a static cache: model.generate(..., cache_implementation="static").
"""

import time

import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

import moe_ops.integrations.transformers as moe_ops_experts

MODEL, DEVICE = None, "cpu"
PROMPT = torch.tensor([[3, 14, 15, 9, 26, 5, 35]])


def load():
    """The keyword is all that a checkpoint needs; a random model takes its place here."""
    if MODEL is not None:
        model = AutoModelForCausalLM.from_pretrained(MODEL, experts_implementation="moe_ops", dtype=torch.bfloat16)
        return model.to(DEVICE)
    torch.manual_seed(1)
    config = Qwen3MoeConfig(
        vocab_size=64,
        hidden_size=128,
        head_dim=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=128,
        initializer_range=0.2,
        eos_token_id=None,
    )
    return AutoModelForCausalLM.from_config(config, experts_implementation="moe_ops").to(DEVICE, torch.bfloat16)


def generate(model) -> list[int]:
    return model.generate(PROMPT.to(DEVICE), max_new_tokens=12, do_sample=False)[0].tolist()


@torch.inference_mode()
def main() -> None:
    model = load().eval()
    print("moe_ops, bf16   ", generate(model))
    model.set_experts_implementation("eager")  # bf16 weights are used as they are, so nothing was changed
    print("eager           ", generate(model))

    for name, report in moe_ops_experts.prepare(model, "fp8_block").items():
        print(f"{name}: {report}")
    print("moe_ops, fp8    ", generate(model))

    start = time.perf_counter()
    compiled = torch.compile(model, fullgraph=True, dynamic=True)
    for length in (3, 5, 7):
        prompt = PROMPT[:, :length].to(DEVICE)
        tokens = [int(run(prompt, use_cache=False).logits[0, -1].argmax()) for run in (compiled, model)]
        print(f"after {length} tokens comes {tokens[0]} compiled, {tokens[1]} eager")
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    print(f"{graphs} graph for all lengths, compiled in {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
