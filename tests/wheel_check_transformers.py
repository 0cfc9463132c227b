"""Run by wheel_check.sh: the one-liner on small random models, read from files, against the same with eager experts."""

import tempfile

import torch
from transformers import AutoModelForCausalLM

import moe_ops.integrations.transformers
from moe_ops.integrations.modules import is_experts
from moe_ops.recipes import RECIPES
from moe_ops.testing import relative_error
from moe_ops.testing.small_models import small_model

NEAR_TIE = 0.15  # between logits of standard deviation 2.2: the 1 % that bf16 experts may add decides there


def load(path: str, experts: str):
    return AutoModelForCausalLM.from_pretrained(path, experts_implementation=experts, dtype=torch.bfloat16).eval()


def experts_error(model, eager) -> float:
    """The largest relative error of an experts module's result, for the same tokens and routes."""
    twins, calls = dict(eager.named_modules()), []
    hooks = [
        module.register_forward_hook(lambda _, args, out, name=name: calls.append((name, args, out)))
        for name, module in model.named_modules()
        if is_experts(module)
    ]
    model(torch.randint(2, 64, (2, 21)), use_cache=False)
    for hook in hooks:
        hook.remove()
    assert calls
    return max(relative_error(out, twins[name](*args)) for name, args, out in calls)


@torch.no_grad()
def main() -> None:
    for family in ("qwen3_moe", "gpt_oss"):
        torch.manual_seed(0)
        with tempfile.TemporaryDirectory() as path:
            small_model(family, dtype=torch.bfloat16).save_pretrained(path)
            model, quantised, eager = load(path, "moe_ops"), load(path, "moe_ops"), load(path, "eager")
        prompt = torch.randint(2, 64, (4, 9))
        given = dict(max_new_tokens=8, do_sample=False, output_logits=True, return_dict_in_generate=True)
        want, got = eager.generate(prompt, **given), model.generate(prompt, **given)
        best, second = torch.stack(want.logits, 1).float().topk(2).values.unbind(-1)
        clear = (best - second > NEAR_TIE).long().cumprod(1).sum(1).tolist()
        for row, new in enumerate(clear):
            assert torch.equal(got.sequences[row, : 9 + new], want.sequences[row, : 9 + new])
        same = int((got.sequences == want.sequences)[:, 9:].sum())
        error = experts_error(model, eager)
        assert error < RECIPES["bf16"].max_diff
        print(f"{family}: bf16 experts {error:.4f} from eager, {same} of 32 greedy tokens equal, ", end="")
        print(f"{sum(clear)} before the first near tie, all equal")
        report = next(iter(moe_ops.integrations.transformers.prepare(quantised, "fp8_block", progress=False).values()))
        error, bound = (
            experts_error(quantised, eager),
            (RECIPES["fp8_block"].max_diff ** 2 + 4 * report.relative_error**2) ** 0.5,
        )
        assert error < bound
        print(f"{family}: fp8_block experts {error:.4f} from eager, allowed {bound:.4f}")


if __name__ == "__main__":
    main()
