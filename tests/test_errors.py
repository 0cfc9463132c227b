"""moe::fused_deepgemm explains itself: one bad argument at a time, the whole sentence."""

import pytest
import torch

from moe_ops import plan, prepare_weights
from moe_ops.testing import LayerCase, poisoned

CASE = LayerCase("fp8_block", T=4, E=4, K=256, I=128, top_k=2)


def good() -> dict:
    (x, topk_weights, topk_ids), weights = CASE.build()
    tensors = dict(hidden_states=x, topk_weights=topk_weights, topk_ids=topk_ids, **weights.tensors())
    return dict(recipe="fp8_block", **tensors)


def other(name: str, **prepare):
    w13, w2 = torch.randn(4, 256, 256), torch.randn(4, 256, 128)
    return getattr(prepare_weights(w13, w2, **prepare), name)


def _input_inside(arena: torch.Tensor) -> dict:
    """hidden_states at the very end of the workspace."""
    return {"workspace": arena, "hidden_states": arena[-2048:].view(torch.bfloat16).view(4, 256)}


BAD = [
    (
        "hidden_states wrong rank",
        lambda a: {"hidden_states": a["hidden_states"][None]},
        ValueError,
        "fused_deepgemm: hidden_states must be of shape (T, K); got (1, 4, 256). "
        "Flatten batch and sequence into tokens.",
    ),
    (
        "hidden_states wrong dtype",
        lambda a: {"hidden_states": a["hidden_states"].int()},
        TypeError,
        "fused_deepgemm: hidden_states must be bfloat16 or float16 or float32; got int32. Cast them first.",
    ),
    (
        "topk_ids wrong dtype",
        lambda a: {"topk_ids": a["topk_ids"].float()},
        TypeError,
        "fused_deepgemm: topk_ids must be int32 or int64; got float32. Use topk_ids.int().",
    ),
    (
        "topk_ids wrong rows",
        lambda a: {"topk_ids": a["topk_ids"][:3]},
        ValueError,
        "fused_deepgemm: topk_ids must be of shape (T, top_k) = (4, any); got (3, 2). One row per token.",
    ),
    (
        "topk_weights wrong shape",
        lambda a: {"topk_weights": a["topk_weights"][:, :1]},
        ValueError,
        "fused_deepgemm: topk_weights must be of shape (T, top_k) = (4, 2); got (4, 1). One weight per route.",
    ),
    (
        "w13 wrong dtype",
        lambda a: {"w13": a["w13"].bfloat16()},
        TypeError,
        "fused_deepgemm: w13 must be float8_e4m3fn; got bfloat16. That is recipe fp8_block. "
        "Use moe_ops.prepare_weights.",
    ),
    (
        "w13 wrong shape",
        lambda a: {"w13": a["w13"][:, :128].contiguous()},
        ValueError,
        "fused_deepgemm: w13 must be of shape (E, 2 I, K) = (4, 256, 256); got (4, 128, 256). "
        "Use moe_ops.prepare_weights.",
    ),
    (
        "w2 wrong stride",
        lambda a: {"w2": a["w2"].transpose(1, 2).contiguous().transpose(1, 2)},
        ValueError,
        "fused_deepgemm: w2 must be contiguous (K-major), strides (32768, 128, 1); got (32768, 1, 256). "
        "Call .contiguous() once, at load.",
    ),
    (
        "w13_scale missing",
        lambda a: {"w13_scale": None},
        ValueError,
        "fused_deepgemm: w13_scale must be given for recipe fp8_block; got None. Pass it.",
    ),
    (
        "w13_scale wrong group",
        lambda a: {"w13_scale": a["w13_scale"].repeat_interleave(4, 2)},
        ValueError,
        "fused_deepgemm: w13_scale must be of shape (E, rows, groups) = (4, 2, 2); got (4, 2, 8). "
        "Use moe_ops.prepare_weights.",
    ),
    (
        "w13_scale wrong kind",
        lambda a: {"w13_scale": a["w13_scale"].half()},
        TypeError,
        "fused_deepgemm: w13_scale must be float32 or int32; got float16. Recipe fp8_block has no other. "
        "Use moe_ops.prepare_weights.",
    ),
    (
        "scale kinds mixed",
        lambda a: {"w2_scale": other("w2_scale", recipe="fp8_block", scale_format="ue8m0")},
        ValueError,
        "fused_deepgemm: w2_scale must be in the scale format of w13_scale, fp32; got ue8m0. "
        "Prepare both with one call of moe_ops.prepare_weights.",
    ),
    (
        "packed scale made contiguous",
        lambda a: (
            {
                name: other(name, recipe="fp8_block", scale_format="ue8m0").contiguous()
                for name in ("w13_scale", "w2_scale")
            }
            | {
                "hidden_states": torch.randn(4, 1024).bfloat16(),
                **{
                    name: getattr(
                        prepare_weights(
                            torch.randn(4, 256, 1024),
                            torch.randn(4, 1024, 128),
                            recipe="fp8_block",
                            scale_format="ue8m0",
                        ),
                        name,
                    ).contiguous()
                    for name in ("w13", "w13_scale", "w2", "w2_scale")
                },
            }
        ),
        ValueError,
        "fused_deepgemm: w13_scale must be MN-major, strides (512, 1, 256); got (512, 2, 1). "
        "It was made contiguous on the way. Use moe_ops.prepare_weights.",
    ),
    (
        "mx scale in fp32",
        lambda a: {"recipe": "mxfp8"},
        TypeError,
        "fused_deepgemm: w13_scale must be int32; got float32. Recipe mxfp8 has no other. Use moe_ops.prepare_weights.",
    ),
    (
        "scale for bf16",
        lambda a: {"recipe": "bf16", "w13": a["w13"].bfloat16()},
        ValueError,
        "fused_deepgemm: w13_scale must be None for recipe bf16; got (4, 2, 2). Drop it.",
    ),
    (
        "unknown recipe",
        lambda a: {"recipe": "nvfp4"},
        ValueError,
        "fused_deepgemm: recipe must be one of bf16, fp8_block, mxfp8, mxfp4; got 'nvfp4'. Choose one of them.",
    ),
    (
        "unknown layout",
        lambda a: {"layout": "psum"},
        ValueError,
        "fused_deepgemm: layout must be one of auto, contiguous, masked, gathered, direct; got 'psum'. "
        "Choose one of them.",
    ),
    (
        "unknown backend",
        lambda a: {"backend": "cutlass"},
        ValueError,
        "fused_deepgemm: backend must be one of auto, reference, triton, deep_gemm; got 'cutlass'. Choose one of them.",
    ),
    (
        "bias of another layer",
        lambda a: {"w13_bias": torch.zeros(3, 256)},
        ValueError,
        "fused_deepgemm: w13_bias must be of shape (E, 2 I) = (4, 256); got (3, 256). One row per local expert.",
    ),
    (
        "two clamps",
        lambda a: {"swiglu_limit": 7.0, "gemm1_alpha": 1.702},
        ValueError,
        "fused_deepgemm: swiglu_limit must be None beside gemm1_alpha; got 7.0. "
        "The clamp of the gemm1_alpha form is gemm1_clamp_limit.",
    ),
    (
        "clamp without its formula",
        lambda a: {"gemm1_clamp_limit": 7.0},
        ValueError,
        "fused_deepgemm: gemm1_clamp_limit must be None without gemm1_alpha; got 7.0. "
        "The clamp of plain silu is swiglu_limit.",
    ),
    (
        "expert range",
        lambda a: {"expert_start": 2, "num_experts": 4},
        ValueError,
        "fused_deepgemm: num_experts must be at least expert_start + E = 6, or -1; got 4. "
        "It counts the experts of all ranks.",
    ),
    (
        "workspace too small",
        lambda a: {"workspace": poisoned(1024)},
        ValueError,
        "fused_deepgemm: workspace must be at least {needed} bytes; got 1024. "
        "Size it by moe_ops.plan(...).workspace_bytes for the largest T.",
    ),
    (
        "workspace wrong dtype",
        lambda a: {"workspace": torch.zeros(1 << 20)},
        TypeError,
        "fused_deepgemm: workspace must be uint8; got float32. Allocate torch.empty(bytes, dtype=torch.uint8).",
    ),
    (
        "workspace over an input",
        lambda a: _input_inside(poisoned(1 << 22)),
        ValueError,
        "pre_permute_ws: workspace must be apart from every input; got an overlap with one. "
        "Give the workspace memory of its own.",
    ),
    (
        "weight missing",
        lambda a: {"w13": None},
        ValueError,
        "fused_deepgemm: w13 must be given always; got None. Pass it.",
    ),
    (
        "hidden size of another model",
        lambda a: {"hidden_states": a["hidden_states"][:, :128]},
        ValueError,
        "fused_deepgemm: hidden_states must be of shape (T, K) = (4, 256); got (4, 128). "
        "K is that of w2; pad or project to it.",
    ),
    (
        "workspace misaligned",
        lambda a: {"workspace": poisoned(1 << 22)[8:]},
        ValueError,
        "pre_permute_ws: workspace must be at an address divisible by 64; got remainder 8. "
        "Pass a tensor of its own, not a slice.",
    ),
    (
        "gradient",
        lambda a: {"hidden_states": a["hidden_states"].clone().requires_grad_()},
        RuntimeError,
        "moe::fused_deepgemm: hidden_states must not ask for a gradient; got one that does. This package is for "
        "inference: detach it, or call the op under torch.inference_mode() or torch.no_grad().",
    ),
]


@pytest.mark.parametrize("change, kind, message", [row[1:] for row in BAD], ids=[row[0] for row in BAD])
def test_fused_deepgemm_explains_itself(change, kind, message):
    arguments = good()
    arguments.update(change(arguments))
    needed = plan(T=4, E=4, K=256, I=128, top_k=2, recipe="fp8_block").total_bytes
    with pytest.raises(kind) as caught:
        torch.ops.moe.fused_deepgemm(**arguments)
    assert str(caught.value) == message.replace("{needed}", str(needed))


def test_gradients_may_be_off_with_weights_that_want_them():
    arguments = good()
    arguments["hidden_states"].requires_grad_()
    expected = torch.ops.moe.fused_deepgemm(**good())
    for mode in (torch.no_grad(), torch.inference_mode()):
        with mode:
            assert torch.equal(torch.ops.moe.fused_deepgemm(**arguments), expected)
