"""Contract of moe::fused_deepgemm: every argument of the layer, checked once before the first stage."""

from moe_ops import check
from moe_ops.arch import BACKENDS
from moe_ops.meta.grouped_gemm import check_format, check_weight
from moe_ops.meta.post_permute import check_weights
from moe_ops.meta.pre_permute import check_tokens
from moe_ops.meta.silu_and_quant import check_activation, check_bias
from moe_ops.recipes import get_recipe
from moe_ops.rows import LAYOUTS


def fused_deepgemm(
    *,
    hidden_states,
    topk_weights,
    topk_ids,
    w13,
    w13_scale,
    w2,
    w2_scale,
    recipe,
    layout,
    w13_bias,
    w2_bias,
    activation,
    swiglu_limit,
    gemm1_alpha,
    gemm1_clamp_limit,
    expert_start,
    num_experts,
    weight_format,
    backend,
    **fp8,
) -> dict:
    """The sizes of the layer, by the names that every stage's schema ends with (workspace.LAYER_SCHEMA)."""
    op = "fused_deepgemm"
    required = dict(hidden_states=hidden_states, topk_weights=topk_weights, topk_ids=topk_ids, w13=w13, w2=w2)
    for name, tensor in required.items():
        check.given(op, name, tensor, "always")
    row = get_recipe(op, recipe)
    check.one_of(op, "layout", layout, LAYOUTS)
    check.one_of(op, "backend", backend, BACKENDS)
    form = check_format(op, weight_format, row)
    for name, w in (("w13", w13), ("w2", w2)):
        axes = "4 axes (E, K / 64, N, 32)" if form.repacked else "3 axes (E, N, K)"
        check.value(w.dim() == int(axes[0]), op, name, f"of {axes}", lambda w=w: tuple(w.shape), "Stack the experts.")
    fix = "Repacked weights are read in no other layout."
    check.value(not form.repacked or layout in ("auto", "gathered"), op, "layout", "auto or gathered", layout, fix)
    # Weights fix everything but the token count: ints, so that only T can be symbolic from here on.
    E, K, I = map(int, form.sizes(w2, row.w_pack))
    check.value(E >= 1, op, "w13", "of at least one expert", E, "A rank without experts skips the layer.")
    check_tokens(op, hidden_states, topk_ids)
    T, top_k = hidden_states.shape[0], int(topk_ids.shape[1])
    check.shape(op, "hidden_states", hidden_states, (T, K), "(T, K)", "K is that of w2; pad or project to it.")
    check_weights(op, topk_weights, T, top_k)
    of_w13 = check_weight(op, "w13", w13, w13_scale, (E, 2 * I, K), "(E, 2 I, K)", row, weight_format)
    of_w2 = check_weight(op, "w2", w2, w2_scale, (E, K, I), "(E, K, I)", row, weight_format)
    fix = "Prepare both with one call of moe_ops.prepare_weights."
    check.value(of_w13 == of_w2, op, "w2_scale", f"in the scale format of w13_scale, {of_w13}", of_w2, fix)
    check_bias(op, "w13_bias", w13_bias, (E, 2 * I), "(E, 2 I)")
    check_bias(op, "w2_bias", w2_bias, (E, K), "(E, K)")
    check_activation(op, activation, swiglu_limit, gemm1_alpha, gemm1_clamp_limit)
    check.value(expert_start >= 0, op, "expert_start", "at least 0", expert_start, "It is this rank's first expert id.")
    check.value(
        num_experts == -1 or expert_start + E <= num_experts,
        op,
        "num_experts",
        f"at least expert_start + E = {expert_start + E}, or -1",
        num_experts,
        "It counts the experts of all ranks.",
    )
    check.same_device(
        op,
        hidden_states.device,
        topk_weights=topk_weights,
        w13=w13,
        w13_scale=w13_scale,
        w2=w2,
        w2_scale=w2_scale,
        w13_bias=w13_bias,
        w2_bias=w2_bias,
        **fp8,
    )
    sizes = dict(T=T, top_k=top_k, E=E, K=K, I=I, num_experts=num_experts)
    form = dict(recipe=recipe, scale_format=of_w13, weight_format=weight_format, has_fp8=_has_fp8(op, E, K, I, **fp8))
    return dict(**sizes, **form, layout=layout)


def _has_fp8(op, E, K, I, **fp8) -> bool:
    """Whether the weights are given as fp8 blocks too; all four tensors, or none."""
    missing = [name for name, tensor in fp8.items() if tensor is None]
    if len(missing) == len(fp8):
        return False
    check.value(not missing, op, "w13_fp8 and its companions", "all given or none", f"no {missing}", "Pass all four.")
    row = get_recipe(op, "fp8_block")
    for name, shape, letters in (("w13_fp8", (E, 2 * I, K), "(E, 2 I, K)"), ("w2_fp8", (E, K, I), "(E, K, I)")):
        scale = fp8[f"{name}_scale"]
        got = check_weight(op, name, fp8[name], scale, shape, letters, row)
        check.value(got == "fp32", op, f"{name}_scale", "in scale format fp32", got, "Use moe_ops.repack_weights.")
    return True
