"""Whole models of transformers with experts_implementation="moe_ops", against the same models with eager experts."""

import copy
import functools
import runpy
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", reason="needs transformers (pip install 'fused-moe-ops[hf]')")

from torch._dynamo.testing import CompileCounter  # noqa: E402
from transformers import AutoModelForCausalLM, CompileConfig  # noqa: E402

from moe_ops.integrations import transformers as integration  # noqa: E402
from moe_ops.integrations.modules import is_experts  # noqa: E402
from moe_ops.integrations.transformers import prepare  # noqa: E402
from moe_ops.recipes import RECIPES  # noqa: E402
from moe_ops.testing import relative_error  # noqa: E402
from moe_ops.testing.small_models import FAMILIES, small_model  # noqa: E402

ROOT = Path(__file__).parents[2]
NEAR_TIE = 0.15  # logits (of standard deviation 2.2): the 1 % that bf16 experts may add decides between such tokens


def tokens(batch: int, length: int) -> torch.Tensor:
    return torch.randint(2, 64, (batch, length))


def experts_of(model) -> dict:
    return {name: module for name, module in model.named_modules() if is_experts(module)}


def put_on_fp8_grid(model) -> None:
    """Expert weights that 128 x 128 blocks hold exactly: e4m3 values times 2^-10, 448 in every block."""
    for module in experts_of(model).values():
        for name in ("gate_up_proj", "down_proj"):
            w = getattr(module, name)
            grid = (w * 2**10).clamp(-448, 448).to(torch.float8_e4m3fn).float()
            grid[:, ::128, ::128] = grid[:, ::128, 1::128] = 448  # both halves, interleaved or not
            w.copy_(grid / 2**10)


def assert_layers_match(model, eager, max_diff: float) -> None:
    """Every experts module gives what `eager` (float32, untouched weights) gives for the same tokens and routes."""
    twins, calls = experts_of(eager), []
    for name, module in experts_of(model).items():
        module.register_forward_hook(lambda _, args, out, name=name: calls.append((name, args, out)))
    with torch.no_grad():
        model(tokens(2, 21), use_cache=False)
        assert {name for name, *_ in calls} == twins.keys()
        for name, (hidden, ids, weights), out in calls:
            want = twins[name](hidden.float(), ids, weights.float())
            assert out.dtype == hidden.dtype
            assert relative_error(out, want) < max_diff, name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_bf16_matches_eager(family, dtype):
    model = small_model(family, dtype=dtype)
    eager = copy.deepcopy(model).float()
    eager.set_experts_implementation("eager")
    model.set_experts_implementation("moe_ops")
    assert_layers_match(model, eager, RECIPES["bf16"].max_diff)


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_fp8_block_matches_eager(family):
    """On weights that fp8 blocks hold exactly, what differs is the rounding of activations: the recipe's bound."""
    model = small_model(family)
    put_on_fp8_grid(model)
    eager = copy.deepcopy(model)
    eager.set_experts_implementation("eager")
    reports = prepare(model, "fp8_block", progress=False)
    assert reports.keys() == experts_of(eager).keys()
    assert all(report.recipe == "fp8_block" and report.relative_error == 0 for report in reports.values())
    assert_layers_match(model, eager, RECIPES["fp8_block"].max_diff)


@pytest.mark.parametrize("recipe", ["fp8_block", "mxfp8", "mxfp4"])
def test_transformers_pads_sizes_that_groups_do_not_divide(recipe):
    """gpt-oss has the hard layout (transposed, interleaved, biased); K = 96 and I = 72 are no multiples of a group."""
    model = small_model("gpt_oss", hidden_size=96, intermediate_size=72, head_dim=24)
    eager = copy.deepcopy(model)
    eager.set_experts_implementation("eager")
    report = next(iter(prepare(model, recipe, progress=False).values()))
    assert (report.padding.K, report.padding.I) == ((32, 56) if recipe != "mxfp8" else (0, 24))
    error = report.relative_error  # of gate, up and down, independent of one another and of that of the activations
    assert_layers_match(model, eager, (RECIPES[recipe].max_diff ** 2 + 3 * error**2) ** 0.5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_generate_gives_the_eager_tokens(family, dtype):
    """Greedy decoding with a cache: the same tokens, up to the first choice that was a near tie for eager."""
    model, prompts = small_model(family, dtype=dtype), tokens(4, 9)
    model.set_experts_implementation("eager")
    arguments = dict(max_new_tokens=6, do_sample=False, output_logits=True, return_dict_in_generate=True)
    want = model.generate(prompts, **arguments)
    model.set_experts_implementation("moe_ops")
    got = model.generate(prompts, **arguments)
    best, second = torch.stack(want.logits, 1).float().topk(2).values.unbind(-1)
    clear = (best - second > NEAR_TIE).long().cumprod(1).sum(1)  # new tokens of each prompt before a near tie
    assert clear.sum() >= 10
    for row, new in enumerate(clear.tolist()):
        assert got.sequences[row, : 9 + new].tolist() == want.sequences[row, : 9 + new].tolist()


@pytest.mark.unpoisoned(reason="Dynamo would trace the poison")
@pytest.mark.parametrize("family, recipe", [*((family, None) for family in FAMILIES), ("gpt_oss", "fp8_block")])
def test_transformers_compiles_to_one_graph(family, recipe):
    """Fullgraph and dynamic, three lengths; preparation while the first call is traced (None), or before."""
    model = small_model(family, dtype=torch.bfloat16)
    model.set_experts_implementation("moe_ops")
    if recipe:
        prepare(model, recipe, progress=False)
    counter = CompileCounter()
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=counter, fullgraph=True, dynamic=True)
    with torch.no_grad():
        for length in (5, 9, 17):
            ids = tokens(2, length)
            assert torch.equal(compiled(ids, use_cache=False).logits, model(ids, use_cache=False).logits)
    assert counter.frame_count == 1


@pytest.mark.unpoisoned(reason="Dynamo would trace the poison")
def test_transformers_compiles_on_an_older_torch_what_is_prepared(monkeypatch):
    monkeypatch.setattr(integration, "_PREPARES_WHILE_TRACED", False)
    model, ids = small_model("olmoe", dtype=torch.bfloat16), tokens(2, 5)
    model.set_experts_implementation("moe_ops")
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True, dynamic=True)
    with torch.no_grad():
        with pytest.raises(Exception, match=r"OlmoeExperts must be prepared before it is traced.*prepare\(model\)"):
            compiled(ids, use_cache=False)
        prepare(model, progress=False)
        assert torch.equal(compiled(ids, use_cache=False).logits, model(ids, use_cache=False).logits)


@pytest.mark.unpoisoned(reason="Dynamo would trace the poison")
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_transformers_generates_compiled_with_a_static_cache(family):
    model, prompt = small_model(family, dtype=torch.bfloat16), tokens(2, 9)
    model.set_experts_implementation("moe_ops")
    arguments = dict(max_new_tokens=6, do_sample=False)
    want = model.generate(prompt, **arguments)
    compile_config = CompileConfig(fullgraph=True, backend="aot_eager", mode=None)
    compile_config._compile_all_devices = True  # generate compiles on accelerators only, unless told
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    got = model.generate(prompt, **arguments, cache_implementation="static", compile_config=compile_config)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] >= 1
    assert torch.equal(got, want)


class Logits(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, ids):
        return self.model(input_ids=ids, use_cache=False).logits


@pytest.mark.unpoisoned(reason="export would trace the poison")
@pytest.mark.parametrize("family, recipe", [("qwen3_moe", None), ("gpt_oss", "fp8_block"), ("deepseek_v3", "mxfp4")])
def test_transformers_exports_with_a_dynamic_length(family, recipe):
    model = small_model(family, dtype=torch.bfloat16)
    prepare(model, recipe, progress=False)
    dynamic = {"ids": {1: torch.export.Dim.AUTO}}
    with torch.no_grad():
        exported = torch.export.export(Logits(model), (tokens(2, 9),), dynamic_shapes=dynamic)
        assert any("fused_deepgemm" in str(node.target) for node in exported.graph.nodes)
        ids = tokens(2, 13)
        assert torch.equal(exported.module()(ids), model(ids, use_cache=False).logits)


def test_transformers_from_pretrained(tmp_path):
    """The keyword alone. bf16 weights stay what they are: the model can be saved, and switched back."""
    small_model("qwen3_moe", dtype=torch.bfloat16).save_pretrained(tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", experts_implementation="moe_ops", dtype=torch.bfloat16
    )
    with torch.no_grad():
        model.eval()(tokens(2, 5))
    for module in experts_of(model).values():
        assert not list(module.moe_ops.buffers())
    model.save_pretrained(tmp_path / "again")
    model.set_experts_implementation("eager")
    with torch.no_grad():
        model(tokens(2, 5))


@pytest.mark.unpoisoned(reason="Dynamo would trace the poison")
def test_transformers_example_runs(monkeypatch, capsys):
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))  # Inductor takes long
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    runpy.run_path(str(ROOT / "examples" / "06_transformers.py"))["main"]()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split("[")[1] == lines[1].split("[")[1]  # tokens of moe_ops and of eager experts
    assert lines[-1].startswith("1 graph for all lengths")
