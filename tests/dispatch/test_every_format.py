"""One contract for every dispatch format: ranks x recipes, against one process without dispatch."""

from dataclasses import replace

import pytest
import torch

from moe_ops.dispatch import FORMATS
from moe_ops.recipes import RECIPES
from moe_ops.testing import assert_bits_equal, decode_rows, relative_error
from moe_ops.testing.dispatch_cases import DispatchCase, run_case, run_coded, run_counted, run_identity

TOKENS = ((9,), (5, 4), (5, 0, 3, 1))
MAX_TOKENS = 9


def case_of(name, recipe="bf16", tokens=(5, 0, 3, 1), **more):
    return DispatchCase(name, recipe, tokens, max_tokens=MAX_TOKENS, **more)


def together(form, outs):
    """The ranks' results as one: in turn, or added up where the format leaves that to the tail."""
    return torch.cat(outs) if form.reduces else torch.stack(outs).float().sum(0).to(outs[0].dtype)


def assert_as_declared(ranks, case, **more):
    """Bit for bit the sum over routes with the declared roundings; returns the joint result."""
    form = FORMATS[case.format]
    outs = ranks.run(case.ranks, run_case, case, **more)
    if form.reduces:
        assert_bits_equal(torch.cat(outs), case.expected(form), str(case))
    else:
        for rank, out in enumerate(outs):
            assert_bits_equal(out, case.expected(form, rank_of_sum=rank), f"{case}, rank {rank}")
    return together(form, outs)


@pytest.mark.parametrize("tokens", TOKENS, ids=lambda tokens: f"{len(tokens)}ranks")
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", FORMATS)
def test_format_equals_one_rank(ranks, name, recipe, tokens):
    case = case_of(name, recipe, tokens)
    got = assert_as_declared(ranks, case)
    inputs, weights = case.build()
    one_rank = case.layer.run(inputs, weights, routed_scaling_factor=case.scaling)
    if FORMATS[name].sums == "rows" or (len(tokens) == 1 and FORMATS[name].scaled_in == "post_permute"):
        assert_bits_equal(got, one_rank, str(case))
    judge = case.layer.judge(inputs, weights, routed_scaling_factor=case.scaling)
    assert relative_error(got, judge) < case.layer.max_diff


@pytest.mark.parametrize("distribution", ["one_expert", "every_other", "foreign", "repeated"])
@pytest.mark.parametrize("name", FORMATS)
def test_format_any_routing(ranks, name, distribution):
    """All tokens to one rank; ids of -1 and beyond the last expert; the same expert twice in one row."""
    assert_as_declared(ranks, case_of(name, "fp8_block", distribution=distribution))


@pytest.mark.parametrize("tokens", [(0, 0, 0, 0), (0, 9, 0, 0), (9, 9, 9, 9)], ids=str)
@pytest.mark.parametrize("name", FORMATS)
def test_format_any_number_of_tokens(ranks, name, tokens):
    """No token at all, one rank alone with some, and every slot full."""
    assert_as_declared(ranks, case_of(name, "mxfp8", tokens))


@pytest.mark.parametrize("scale_format", ["fp32", "ue8m0"])
@pytest.mark.parametrize("payload", ["bf16", "fp8"])
@pytest.mark.parametrize("name", [name for name, form in FORMATS.items() if "fp8" in form.payloads])
def test_format_payload_changes_no_bit(ranks, name, payload, scale_format):
    """Quantised at home or behind the journey: the same groups, the same bits. K has two packed words of scales."""
    case = case_of(name, "fp8_block", (3, 2), payload=payload, scale_format=scale_format, K=1024)
    assert_as_declared(ranks, case)


@pytest.mark.parametrize("name", FORMATS)
def test_format_stage_by_stage(ranks, name):
    """The four methods by hand give what run gives, where moe::fused_deepgemm takes the place of some."""
    for layout in ("contiguous", "masked") if len(FORMATS[name].layouts) == 2 else ("auto",):
        assert_as_declared(ranks, case_of(name, "fp8_block", (5, 4), layout=layout), stages=True)


@pytest.mark.parametrize("name", FORMATS)
def test_format_biases_clamps_and_other_dtypes(ranks, name):
    gpt_oss = dict(gemm1_alpha=1.702, gemm1_clamp_limit=7.0)
    assert_as_declared(ranks, case_of(name, "mxfp4", (5, 4), bias=True, attributes=gpt_oss))
    case = case_of(name, "bf16", (5, 4), dtype=torch.float32)
    inputs, weights = case.build()
    got = together(FORMATS[name], ranks.run(2, run_case, case))
    assert got.dtype == torch.float32
    judge = case.layer.judge(inputs, weights, routed_scaling_factor=case.scaling)
    assert relative_error(got, judge) < case.layer.max_diff


@pytest.mark.parametrize("tokens", TOKENS[1:], ids=lambda tokens: f"{len(tokens)}ranks")
@pytest.mark.parametrize("distribution", ["uniform", "foreign", "repeated"])
@pytest.mark.parametrize("name", FORMATS)
def test_every_route_comes_back_once_with_its_weight_scaled_once(ranks, name, distribution, tokens):
    """Expert e answers in column e. Weights 1/2, 1/4, 1/8 and a scaling of 2 add up without rounding."""
    case = case_of(name, "fp8_block", tokens, distribution=distribution, scaling=2.0)
    (_, _, ids), _ = case.build()
    tag = torch.arange(len(ids)) % 7 + 1.0
    weights = torch.tensor([0.5, 0.25, 0.125]).expand(len(ids), 3)
    hidden_states = tag[:, None].expand(-1, case.K).to(torch.bfloat16)
    got = together(FORMATS[name], ranks.run(len(tokens), run_coded, case, hidden_states, weights))
    want = torch.zeros(len(ids), case.K)
    for t, row in enumerate(ids.tolist()):
        for j, expert in enumerate(row):
            if 0 <= expert < case.E:
                want[t, expert] += 2.0 * 0.5 ** (j + 1) * tag[t]
    assert torch.equal(got.float(), want)


@pytest.mark.parametrize("distribution", ["uniform", "repeated", "foreign"])
@pytest.mark.parametrize("name", FORMATS)
def test_experts_get_a_row_for_each_token_and_expert_and_none_for_empty_slots(ranks, name, distribution):
    case = case_of(name, "fp8_block", distribution=distribution)
    (_, _, ids), _ = case.build()
    routes = {(t, e) for t, row in enumerate(ids.tolist()) for e in row if 0 <= e < case.E}
    assert sum(ranks.run(4, run_counted, case)) == len(routes)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", FORMATS)
def test_identity_experts_return_the_input(ranks, name, recipe):
    """Of a quantised recipe, the input as it was quantised: by the wire's groups where it travels quantised. Of each
    128 columns the last ones are too small to share a scale with the first."""
    case = case_of(name, recipe, top_k=2, scaling=4.0)
    (x, _, ids), weights = case.build()
    x = (x * torch.exp2(-5.0 * (torch.arange(case.K) // 32 % 4))).to(torch.bfloat16)
    got = together(FORMATS[name], ranks.run(4, run_identity, case, x, torch.full((len(x), 2), 0.5)))
    row = RECIPES[recipe]
    if row.quantised:
        own_groups = "fp8" not in FORMATS[name].payloads or name.startswith("deepep_v2")
        group = row.x_group if own_groups else 128
        fine = replace(row, x_group=group)
        q, scale = torch.ops.moe.quantize(x, group=group, scale_format=weights.scale_format)
        x = decode_rows(q, scale, fine).to(torch.bfloat16)
    assert torch.equal(got, 4 * x)  # a sum makes +0 of -0
