"""torch.compile, torch.export and AOTInductor: one graph for every token count, no copy, the same bits."""

import re
import subprocess
import sys

import pytest
import torch
from torch import nn

import moe_ops
from moe_ops.testing import FORMS, assert_bits_equal, poisoned

E, K, I = 8, 256, 128
TOKENS = (2, 3, 5, 16, 37, 127, 128, 129, 200, 255, 256, 300)

pytestmark = pytest.mark.slow


def layer(recipe: str = "fp8_block", scale_format: str | None = None, **more) -> moe_ops.MoELayer:
    w13, w2 = torch.randn(E, 2 * I, K) / K**0.5, torch.randn(E, K, I) / I**0.5
    weights = moe_ops.prepare_weights(w13, w2, recipe=recipe, scale_format=scale_format)
    return moe_ops.MoELayer(torch.randn(E, K).bfloat16(), weights, top_k=2, **more)


def hidden(T: int) -> torch.Tensor:
    return torch.randn(T, K).bfloat16()


class Counter:
    """A backend that counts the graphs it is given and hands them to Inductor."""

    def __init__(self):
        self.graphs = 0

    def __call__(self, graph, inputs):
        from torch._inductor.compile_fx import compile_fx

        self.graphs += 1
        return compile_fx(graph, inputs)


@pytest.mark.parametrize("recipe, scale_format", FORMS)
def test_compile_one_graph_serves_every_token_count(recipe, scale_format):
    torch._dynamo.reset()
    eager, counter = layer(recipe, scale_format), Counter()
    compiled = torch.compile(eager, fullgraph=True, dynamic=True, backend=counter)
    for T in TOKENS:
        x = hidden(T)
        with torch.no_grad():
            assert_bits_equal(compiled(x), eager(x), f"T={T}")
    assert counter.graphs == 1


@pytest.mark.parametrize("recipe, scale_format", FORMS)
def test_compile_without_tokens_and_with_one(recipe, scale_format):
    """torch specialises the sizes 0 and 1: two more graphs, whatever came first."""
    for order in ((1, 0, 5), (5, 1, 0)):
        torch._dynamo.reset()
        eager, counter = layer(recipe, scale_format), Counter()
        compiled = torch.compile(eager, fullgraph=True, dynamic=True, backend=counter)
        for T in (*order, 7):
            x = hidden(T)
            with torch.no_grad():
                assert_bits_equal(compiled(x), eager(x), f"T={T} of {order}")
        assert counter.graphs == 3


def test_compile_one_graph_with_every_option():
    torch._dynamo.reset()
    generator = torch.Generator().manual_seed(1)
    shared = nn.Sequential(nn.Linear(K, I), nn.SiLU(), nn.Linear(I, K)).bfloat16().requires_grad_(False)
    eager = layer(
        scoring="sigmoid",
        bias=torch.randn(E, generator=generator),
        num_groups=4,
        topk_group=2,
        swiglu_limit=2.0,
        routed_scaling_factor=2.5,
        shared_expert=shared,
    )
    compiled = torch.compile(eager, fullgraph=True, dynamic=True)
    with torch._dynamo.config.patch(error_on_recompile=True), torch.no_grad():
        for T in TOKENS:
            x = hidden(T)
            # the shared expert is Inductor's own arithmetic, so bits may differ there
            torch.testing.assert_close(compiled(x), eager(x), rtol=2e-2, atol=2e-2)


def test_compile_makes_two_allocations_and_no_copy():
    """The generated code: one workspace, and the result that post_permute_ws returns; no kernel of Inductor's own."""
    from torch._inductor.utils import run_and_get_code

    torch._dynamo.reset()
    module = layer()
    args = hidden(16), *torch.ops.moe.topk(torch.randn(16, E), 2)

    def experts(x, topk_weights, topk_ids):
        tensors = (module.w13, module.w13_scale, module.w2, module.w2_scale)
        return torch.ops.moe.fused_deepgemm(x, topk_weights, topk_ids, *tensors, recipe="fp8_block")

    result, (code,) = run_and_get_code(torch.compile(experts, fullgraph=True, dynamic=True), *args)
    assert_bits_equal(result, experts(*args))
    body = code[code.index("def call(") : code.index("runner = Runner")]
    allocated = re.findall(r"(?:empty|as|new)_strided\w*\(.*?(torch\.\w+)\)", body)
    assert allocated == ["torch.uint8"]
    calls = re.findall(r"torch\.ops\.moe\.(\w+)\.default\(buf", body)
    stages = ["pre_permute_ws", "gated_gemm_ws", "silu_and_quant_ws", "grouped_gemm_ws", "post_permute_ws"]
    assert calls == stages
    for foreign in ("cpp_fused", "aten.copy", "aten.clone", "extern_kernels"):
        assert foreign not in body

    # The whole layer adds the router's logits and the pair that topk returns, and nothing else.
    _, (code,) = run_and_get_code(torch.compile(module, fullgraph=True, dynamic=True), hidden(16))
    body = code[code.index("def call(") : code.index("runner = Runner")]
    assert re.findall(r"empty_strided\w*\(.*?(torch\.\w+)\)", body) == ["torch.bfloat16", "torch.uint8"]
    assert "cpp_fused" not in body and "aten.copy" not in body


@pytest.mark.unpoisoned("counts every call, and poisoning makes calls of its own")
def test_compile_eager_makes_two_allocations():
    from torch.utils._python_dispatch import TorchDispatchMode

    class Record(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.made = []

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor):
                self.made.append((func.name().split(".")[0], out.dtype))
            return out

    module = layer()
    args = hidden(16), *torch.ops.moe.topk(torch.randn(16, E), 2)
    weights = (module.w13, module.w13_scale, module.w2, module.w2_scale)
    with Record() as record:
        torch.ops.moe.fused_deepgemm(*args, *weights, recipe="fp8_block")
    assert record.made == [("aten::new_empty", torch.uint8), ("moe::post_permute_ws", torch.bfloat16)]


def test_compile_layers_share_one_workspace():
    """Two layers through one poisoned arena that the caller owns, with other work between them."""
    torch._dynamo.reset()
    first, second = layer(), layer()
    sizes = dict(E=E, K=K, I=I, top_k=2, recipe="fp8_block")
    arena = poisoned(moe_ops.plan(T=300, **sizes).workspace_bytes)

    def model(x, arena):
        y = first(x, workspace=arena)
        return second(torch.tanh(y) + x, workspace=arena) + y

    def plain(x):
        y = first(x)
        return second(torch.tanh(y) + x) + y

    compiled = torch.compile(model, fullgraph=True, dynamic=True)
    with torch.no_grad():
        for T in (2, 64, 129, 300):
            x = hidden(T)
            expected = torch.compile(plain, fullgraph=True, dynamic=True)(x)
            assert_bits_equal(compiled(x, arena), expected, f"T={T}")
            assert_bits_equal(model(x, arena), plain(x), f"eager T={T}")


class Model(nn.Module):
    """A residual block around the layer. Nothing else: Inductor's own arithmetic may round otherwise than eager's."""

    def __init__(self):
        super().__init__()
        self.moe = layer("mxfp4")

    def forward(self, x):
        return x + self.moe(x)


@pytest.mark.parametrize("strict", [False, True], ids=["non_strict", "strict"])
def test_export_keeps_one_node_and_every_length(strict):
    model = Model().requires_grad_(False)
    dynamic = {0: torch.export.Dim("T", min=2)}
    exported = torch.export.export(model, (hidden(16),), dynamic_shapes={"x": dynamic}, strict=strict)
    alone = torch.export.export(model.moe, (hidden(16),), dynamic_shapes=(dynamic,), strict=strict)
    assert_bits_equal(alone.module()(x := hidden(33)), model.moe(x))
    names = [str(node.target) for node in exported.graph.nodes if "moe." in str(node.target)]
    assert names == ["moe.topk.default", "moe.fused_deepgemm.default"]
    for T in (2, 33, 200):
        x = hidden(T)
        assert_bits_equal(exported.module()(x), model(x), f"T={T}")


def test_export_package_reloads_in_a_fresh_process(tmp_path):
    """torch.export -> save -> load, and an AOTInductor package, both run by another process at three lengths."""
    model = Model().requires_grad_(False)
    exported = torch.export.export(model, (hidden(16),), dynamic_shapes={"x": {0: torch.export.Dim("T", min=2)}})
    torch.export.save(exported, tmp_path / "model.pt2")
    package = torch._inductor.aoti_compile_and_package(exported, package_path=str(tmp_path / "package.pt2"))
    cases = [(x, model(x)) for x in map(hidden, (2, 33, 200))]
    torch.save(cases, tmp_path / "cases.pt")
    script = f"""
import torch, moe_ops
torch.set_num_threads(1)
cases = torch.load({str(tmp_path / "cases.pt")!r})
exported = torch.export.load({str(tmp_path / "model.pt2")!r}).module()
package = torch._inductor.aoti_load_package({package!r})
with torch.no_grad():
    for x, expected in cases:
        assert torch.equal(exported(x), expected), ("export", x.shape)
        assert torch.equal(package(x), expected), ("package", x.shape)
print("equal")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout.strip() == "equal", f"exit {done.returncode}: {done.stderr}"


def test_compile_caches_are_keyed_by_the_schemas():
    """A cached graph of another version of the stages must not be found: Dynamo's graph is the same for both."""
    assert f"moe_ops-{moe_ops.__version__}-" in torch.compiler.config.cache_key_tag
