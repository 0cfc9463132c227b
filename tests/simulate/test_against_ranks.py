"""What was predicted, and what four gloo ranks moved and held: equal to the byte."""

import pytest
import torch

from moe_ops.dispatch import FORMATS
from moe_ops.parallel import decide, every_size
from moe_ops.recipes import RECIPES
from moe_ops.simulate import Links, predict
from moe_ops.simulate.check import disagreements, scenario_of, scenario_of_layer
from moe_ops.simulate.measure import run_layer_bytes, run_measured
from moe_ops.testing.dispatch_cases import DispatchCase
from moe_ops.testing.parallel_cases import ParallelCase

EXCHANGING = [name for name, form in FORMATS.items() if form.reduces]


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", EXCHANGING)
def test_bytes_and_memory_are_those_of_a_run(ranks, name, recipe):
    """Ids of -1 and the same expert twice among the routes; a rank without a token; every slot full."""
    for distribution, tokens in (("foreign", (5, 0, 3, 1)), ("repeated", (9, 9, 9, 9))):
        case = DispatchCase(name, recipe, tokens, max_tokens=9, distribution=distribution, K=512)
        measured = ranks.run(4, run_measured, case)
        row = predict(scenario_of(case), name, "torch", Links(), None)
        assert disagreements(row, measured) == []


def layers():
    for sizes in every_size(4):
        for name in ("standard", "deepep_ll", "deepep_normal"):
            if sizes.moe_tp == 1 or not FORMATS[name].reduces:
                yield ParallelCase(sizes, name, {1: (9,), 2: (5, 4), 4: (5, 0, 3, 1)}[sizes.token_groups])


@pytest.mark.parametrize("case", list(layers()), ids=str)
def test_bytes_of_every_form_are_those_of_a_layer(ranks, case):
    sent = ranks.run(4, run_layer_bytes, case)
    row = predict(scenario_of_layer(case), case.dispatch, "torch", Links(), None)
    assert row.form == decide(case.sizes, case.dispatch)
    want = torch.tensor(sent, dtype=torch.float64)
    assert torch.equal(row.dispatch + row.combine, want)
