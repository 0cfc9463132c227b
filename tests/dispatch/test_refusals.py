"""Wrong inputs are refused in words, before the first collective: on every rank alike."""

from dataclasses import dataclass

import pytest
import torch

from moe_ops import dispatch
from moe_ops.dispatch import FORMATS, ExpertSetup

STATIC = [name for name, form in FORMATS.items() if form.needs_capacity]
COUNTED = [name for name, form in FORMATS.items() if form.needs_host_counts]


@dataclass
class Unreached:
    """A rank whose transport must not be reached."""

    rank: int = 0
    size: int = 1

    def check(self, op, setup):
        pass

    def __getattr__(self, name):
        return lambda *_, **__: pytest.fail(f"{name} was reached")


def setup_of(**more):
    return ExpertSetup(
        **{**dict(num_experts=8, top_k=2, K=256, recipe="bf16", scale_format="none", max_tokens=4), **more}
    )


def tokens(T=3, K=256, top_k=2):
    return torch.zeros(T, K, dtype=torch.bfloat16), torch.ones(T, top_k), torch.zeros(T, top_k, dtype=torch.int32)


@pytest.mark.parametrize("name", STATIC)
def test_refusal_more_tokens_than_capacity(name):
    here = dispatch.create(name, setup_of(), Unreached())
    with pytest.raises(ValueError) as caught:
        here.dispatch(*tokens(T=5))
    assert str(caught.value) == (
        f"dispatch {name}: hidden_states must be of at most max_tokens=4 tokens; got 5. "
        "Raise max_tokens on every rank, or split the batch."
    )


@pytest.mark.parametrize("name", STATIC)
def test_refusal_no_capacity(name):
    with pytest.raises(ValueError, match=f"^dispatch {name}: max_tokens must be given; got None. It is the static"):
        dispatch.create(name, setup_of(max_tokens=None), Unreached())


@pytest.mark.parametrize("name", COUNTED)
def test_refusal_host_counts_in_what_is_captured(name):
    with pytest.raises(ValueError, match=f"format must be one without host counts .* got {name}, which reads on the"):
        dispatch.create(name, setup_of(), Unreached(), captured=True)
    here = dispatch.create(name, setup_of(), Unreached())

    class Layer(torch.nn.Module):
        def forward(self, *batch):
            return here.dispatch(*batch)

    with pytest.raises(Exception, match="format must be one without host counts"):
        torch.compile(Layer(), fullgraph=True, backend="eager")(*tokens())


@pytest.mark.parametrize("name", COUNTED)
def test_refusal_host_counts_while_a_graph_is_captured(name, monkeypatch):
    here = dispatch.create(name, setup_of(), Unreached())
    monkeypatch.setattr("moe_ops.dispatch.base.capturing", lambda: True)
    with pytest.raises(RuntimeError, match="format must be one without host counts"):
        here.dispatch(*tokens())


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    "wrong, kind, words",
    [
        (
            dict(hidden_states=torch.zeros(3, 128).bfloat16()),
            ValueError,
            r"of shape \(T, K\) = \(3, 256\); got \(3, 128\)",
        ),
        (dict(hidden_states=torch.zeros(1, 3, 256)), ValueError, r"of shape \(T, K\); got \(1, 3, 256\). Flatten"),
        (dict(hidden_states=torch.zeros(3, 256, dtype=torch.int32)), TypeError, "hidden_states must be bfloat16 or"),
        (dict(topk_ids=torch.zeros(3, 3, dtype=torch.int32)), ValueError, r"topk_ids must be of shape .* got \(3, 3\)"),
        (dict(topk_ids=torch.zeros(2, 2, dtype=torch.int32)), ValueError, "topk_ids must be of shape"),
        (dict(topk_ids=torch.zeros(3, 2)), TypeError, "topk_ids must be int32 or int64; got float32"),
        (dict(topk_weights=torch.ones(3, 1)), ValueError, "topk_weights must be of shape"),
        (dict(topk_weights=torch.ones(3, 2).int()), TypeError, "topk_weights must be bfloat16 or float16 or float32"),
        (dict(topk_ids=torch.zeros(3, 2, dtype=torch.int32, device="meta")), ValueError, "topk_ids must be on cpu"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_refusal_of_tensors(name, wrong, kind, words):
    here = dispatch.create(name, setup_of(), Unreached())
    batch = dict(zip(("hidden_states", "topk_weights", "topk_ids"), tokens(), strict=True))
    with pytest.raises(kind, match=f"^dispatch {name}: .*{words}"):
        here.dispatch(**{**batch, **wrong})


@pytest.mark.parametrize(
    "wrong, words",
    [
        (dict(num_experts=6), "num_experts must be a multiple of 4; got 6. Choose a number of ranks"),
        (dict(num_experts=0), "num_experts must be an integer >= 1; got 0"),
        (dict(max_tokens=0), "max_tokens must be an integer >= 1; got 0"),
        (dict(payload="fp4"), "payload must be one of auto, bf16, fp8; got 'fp4'"),
        (dict(recipe="fp8_block", scale_format="fp32", K=200), "K must be a multiple of 128; got 200"),
        (dict(recipe="fp8"), "recipe must be one of bf16"),
        (dict(scale_format="fp32"), "scale_format must be one of none; got 'fp32'"),
    ],
)
def test_refusal_of_a_setup(wrong, words):
    with pytest.raises(ValueError, match=words):
        dispatch.create("deepep_ll", setup_of(**wrong), Unreached(rank=1, size=4))


def test_refusal_of_formats_layouts_and_payloads():
    with pytest.raises(ValueError, match="^dispatch: format must be one of standard, flashinfer, .* got 'nccl'"):
        dispatch.create("nccl", setup_of(), Unreached())
    with pytest.raises(ValueError, match="^dispatch deepep_ll: layout must be one of auto, masked; got 'contiguous'"):
        dispatch.create("deepep_ll", setup_of(), Unreached(), layout="contiguous")
    with pytest.raises(ValueError, match="^dispatch standard: layout must be one of auto, contiguous, masked; got"):
        dispatch.create("standard", setup_of(), Unreached(), layout="slabs")
    quantised = setup_of(recipe="fp8_block", scale_format="fp32", payload="fp8")
    for name in ("standard", "flashinfer"):
        with pytest.raises(ValueError, match=f"^dispatch {name}: payload must be one of bf16; got 'fp8'"):
            dispatch.create(name, quantised, Unreached())


def test_refusal_of_a_float32_payload_on_the_way_back():
    here = dispatch.create("flashinfer", setup_of(), Unreached())
    with pytest.raises(TypeError, match="^dispatch flashinfer: out must be bfloat16; got float32. Its payload is bf16"):
        here.combine(torch.zeros(4, 256), None)


def test_refusal_without_a_process_group():
    with pytest.raises(RuntimeError, match="^Collectives: torch.distributed must be initialised"):
        dispatch.TorchTransport()


def test_what_each_format_says_of_itself():
    """Weights in one place, scaling in one place; host counts exactly where rows are counted on the host."""
    for form in FORMATS.values():
        assert form.weights_applied_in in ("post_permute", "combine")
        assert form.scaled_in in ("post_permute", "combine")
        assert form.sums in ("rows", "weighted rows", "partial sums")
        assert (form.sums == "rows") == (form.weights_applied_in == "combine")
        assert set(form.layouts) <= {"contiguous", "masked"} and form.layouts
    assert COUNTED == ["deepep_normal", "deepep_v2"]
