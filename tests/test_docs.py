"""The documents: Python blocks run in order, each page in a namespace of its own; commands parse; printed tables are
what the code prints; files that are named exist. `make docs` builds the site."""

import argparse
import functools
import importlib
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from typer.testing import CliRunner

import moe_ops
import moe_ops.recipes
from moe_ops.testing.checkpoints import write_checkpoint

ROOT = Path(__file__).parent.parent
_PATHS = (*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md")))
PAGES = {path.relative_to(ROOT).as_posix(): path.read_text() for path in _PATHS}
README = PAGES["README.md"]
FENCE = re.compile(r"(?:<!-- not run: (?P<reason>[^>]+) -->\n)?^```(?P<language>\w*)\n(?P<code>.*?)^```", re.S | re.M)
OWN_PROCESS = {"docs/add_op.md": "registers an op", "docs/add_dispatcher.md": "adds to the table of formats"}


def blocks(text, language):
    return [match["code"] for match in FENCE.finditer(text) if match["language"] == language and not match["reason"]]


def run_page(page, namespace):
    for number, block in enumerate(blocks(PAGES[page], "python"), 1):
        exec(compile(block, f"{page}, block {number}", "exec"), namespace)


# What the readers of a page have before its first line.


def before_add_recipe(tmp_path, monkeypatch):
    """Inside of recipes.py."""
    return dict(vars(moe_ops.recipes))


def before_weights(tmp_path, monkeypatch):
    write_checkpoint(tmp_path / "DeepSeek-V4-Flash", "deepseek_v4_mxfp4", E=8, layers=4)
    w13, w2 = torch.randn(8, 256, 256) / 16, torch.randn(8, 256, 128) / 11
    return dict(moe_ops=moe_ops, x=torch.randn(5, 256).bfloat16(), w13=w13, w2=w2)


def before_expert_parallel(tmp_path, monkeypatch):
    """One rank of one."""
    from moe_ops import dispatch, parallel

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    w13, w2 = torch.randn(16, 512, 256) / 16, torch.randn(16, 256, 256) / 16
    return dict(
        **{name: getattr(module, name) for module in (dispatch, parallel) for name in module.__all__},
        rank=0,
        ranks=1,
        weights=moe_ops.prepare_weights(w13, w2, recipe="fp8_block"),
        router=lambda x, ids: moe_ops.topk(x[:, :16].float(), 8),
        hidden_states=torch.randn(5, 256).bfloat16(),
    )


def before_transformers(tmp_path, monkeypatch):
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    sizes = dict(hidden_size=128, head_dim=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
    experts = dict(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=128)
    AutoModelForCausalLM.from_config(Qwen3MoeConfig(vocab_size=64, **sizes, **experts)).save_pretrained(tmp_path)
    return dict(path=tmp_path)


def before_compile(tmp_path, monkeypatch):
    """Dynamo as in Inductor, without the time of a C++ compiler; README.md compiles with Inductor."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    return {}


BEFORE = {
    "docs/add_recipe.md": before_add_recipe,
    "docs/compile.md": before_compile,
    "docs/expert_parallel.md": before_expert_parallel,
    "docs/transformers.md": before_transformers,
    "docs/weights.md": before_weights,
}


@pytest.mark.unpoisoned(reason="documents run as their readers run them")
@pytest.mark.parametrize("page", [page for page in PAGES if blocks(PAGES[page], "python") and page not in OWN_PROCESS])
def test_docs_python_blocks_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    try:
        run_page(page, BEFORE[page](tmp_path, monkeypatch) if page in BEFORE else {})
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def test_docs_python_blocks_that_change_tables_run():
    code = "\n".join("\n".join(blocks(PAGES[page], "python")) for page in OWN_PROCESS)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr


def test_docs_add_recipe_row_is_enough(tmp_path):
    """The row of the page, added to a copy of the package, in every case of verify --quick."""
    page = PAGES["docs/add_recipe.md"]
    (row,) = re.findall(r"^Recipe\(.*\)$", page, re.M)
    name = row.split('"')[1]
    assert f"moe-ops verify --recipe {name}" in page
    subprocess.run(["cp", "-r", ROOT / "moe_ops", ROOT / "meta", tmp_path], check=True)
    recipes = tmp_path / "moe_ops" / "recipes.py"
    recipes.write_text(recipes.read_text().replace('        Recipe("mxfp4"', f'        {row},\n        Recipe("mxfp4"'))
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import moe_ops; from moe_ops.cli import main; "
        f"assert moe_ops.__file__.startswith({str(tmp_path)!r}); "
        f"sys.argv = ['moe-ops', 'verify', '--quick', '--recipe', {name!r}]; main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0 and "9 of 9 cases hold" in done.stdout, done.stdout + done.stderr


def commands():
    """(page, command line) of every fenced or inline command of this package."""
    for page, text in PAGES.items():
        if page == "CHANGELOG.md":  # which speaks of commands in prose
            continue
        lines = [line for code in blocks(text, "") + blocks(text, "bash") for line in code.splitlines()]
        lines += re.findall(r"`([^`\n]+)`", text)
        for line in lines:
            line = re.sub(r"\s+#.*|;.*", "", line.strip().removeprefix("$ "))
            if re.match(r"moe-ops \w|python -m moe_ops|python examples/|torchrun |make [a-z]", line):
                yield page, line


class Parsed(Exception):
    """Raised where a command would go on to work."""


@pytest.fixture
def only_parses(monkeypatch):
    parse = argparse.ArgumentParser.parse_args

    def parse_args(self, arguments=None, namespace=None):
        parse(self, arguments, namespace)
        raise Parsed

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_args)


@pytest.mark.parametrize("page, line", sorted(set(commands())), ids=lambda value: value.removeprefix("docs/"))
def test_docs_commands_parse(page, line, only_parses, tmp_path, monkeypatch):
    """Their options exist, and so do their files; plan and doctor run where no file is asked for."""
    from moe_ops.cli.application import app

    program, *words = shlex.split(line)
    if program == "make":
        assert re.search(rf"^{words[0]}:", (ROOT / "Makefile").read_text(), re.M), line
    elif program == "torchrun" or words[0].startswith("examples/"):
        assert (ROOT / next(word for word in words if word.endswith(".py"))).is_file()
    elif program == "python":
        name = words[1] if words[1].count(".") > 1 else f"{words[1]}.__main__"
        with pytest.raises(Parsed):
            importlib.import_module(name).main(words[2:])
    else:
        monkeypatch.chdir(tmp_path)
        runs = words[0] == "doctor" or "-E" in words
        result = CliRunner().invoke(app, words if runs and "--config" not in words else [*words, "--help"])
        assert result.exit_code == 0, result.output


def test_docs_every_command_has_a_row():
    from moe_ops.cli.application import app

    rows = set(re.findall(r"^\| `(\w+)` \|", PAGES["docs/cli.md"], re.M))
    assert rows == {command.name for command in app.registered_commands}


def test_docs_readme_plan_is_what_the_code_prints():
    printed = str(moe_ops.plan(T=4096, E=32, K=7168, I=2048, top_k=8, recipe="fp8_block"))
    assert printed.split("\n", 1)[1] in README


def test_docs_limits_quote_what_is_raised(capsys):
    run_page("docs/limits.md", {})
    assert capsys.readouterr().out in blocks(PAGES["docs/limits.md"], "")


def test_docs_forms_are_what_the_code_prints():
    from moe_ops import parallel

    assert parallel.table(2) in PAGES["docs/expert_parallel.md"]


@pytest.mark.parametrize("page", PAGES)
def test_docs_links_and_files_exist(page):
    folder = (ROOT / page).parent
    for target in re.findall(r"\]\((?!http|#)([^)#]+)", PAGES[page]):
        assert (folder / target).exists(), f"{page} links to {target}"
    for name in re.findall(r"`((?:moe_ops|meta|tests|examples|csrc_stubs|docs)/[\w/.]*)`", PAGES[page]):
        assert (ROOT / name).exists(), f"{page} names {name}"


def test_docs_every_switch_of_the_article_has_a_row():
    rows = re.findall(r"^\| (`SGLANG_.*?) \|", PAGES["docs/coming-from.md"], re.M)
    assert len(set(re.findall(r"SGLANG_[A-Z0-9_]+", " ".join(rows)))) == 21


def test_docs_reference_has_every_public_name():
    pages = "\n".join(text for page, text in PAGES.items() if page.startswith("docs/reference/"))
    missing = [name for name in moe_ops.__all__ if not re.search(rf"^::: moe_ops\.(\w+\.)*{name}$", pages, re.M)]
    assert not missing


@pytest.mark.slow
def test_docs_demo_runs_and_checks_itself():
    done = subprocess.run([sys.executable, "examples/01_tiny_moe_lm.py"], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "All checks hold." in done.stdout


def test_docs_demo_model_is_reproducible_in_form(monkeypatch):
    """The committed checkpoint is small, and holds what train.py writes."""
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    path = ROOT / "examples" / "tiny_moe_lm" / "tiny_moe_lm.safetensors"
    assert path.stat().st_size <= 4 << 20
    train = runpy.run_path(str(ROOT / "examples" / "tiny_moe_lm" / "train.py"), run_name="train")
    assert callable(train["main"])
