"""warmup: jobs, manifest, lock, memory, and the log. tests/gpu/test_decode.py counts what compiles."""

import json
import logging
import os
import stat
import subprocess
import sys

import pytest
import torch

import moe_ops
from moe_ops import env
from moe_ops.report import forget
from moe_ops.sizes import Layer
from moe_ops.warmup.cache import Manifest
from moe_ops.warmup.jobs import Form, way_of

E, K, I = 4, 128, 128


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    for name in ("MOE_OPS_CACHE_DIR", "TRITON_CACHE_DIR", "DG_JIT_CACHE_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name.lower()))
    forget()


def layer(recipe="mxfp4", **more) -> moe_ops.MoELayer:
    generator = torch.Generator().manual_seed(0)
    w13, w2 = torch.randn(E, 2 * I, K, generator=generator), torch.randn(E, K, I, generator=generator)
    weights = moe_ops.prepare_weights(w13, w2, recipe=recipe)
    return moe_ops.MoELayer(torch.randn(E, K).bfloat16(), weights, **{"top_k": 2, **more})


def the_manifest():
    (path,) = (env.cache_dir() / "warmup").glob("*.json")
    return path


def test_warmup_runs_each_kind_of_call_once():
    first = moe_ops.warmup([layer(), layer()], tokens=[2, 2, 3])
    assert first.found == 0 and first.workers == 0 and first.bytes > 0
    again = moe_ops.warmup(layer(), tokens=[3, 2])
    assert (again.compiled, again.found) == (0, first.compiled)
    other = moe_ops.warmup(layer("bf16"), tokens=[2, 3])
    assert other.compiled == first.compiled and other.found == 0


def test_warmup_of_a_router_with_a_bias_and_of_one_with_a_table():
    assert moe_ops.warmup(layer(scoring="sigmoid", bias=torch.randn(E)), tokens=[5]).compiled == 1
    hashed = layer(hash_table=torch.randint(0, E, (16, 2)))
    assert moe_ops.warmup(hashed, tokens=[5]).compiled == 1


def test_warmup_counts_token_counts_that_take_the_same_kernels_once():
    def ways(tokens, arch):
        made = (Layer(T, 8, 128, 2048, 768, "fp8_block", "fp32") for T in tokens)
        return {way_of(one, "triton", arch) for one in made}

    assert len(ways((65, 67, 99), "sm90")) == 1  # gathered, 16 rows a tile
    assert len(ways((99, 131), "sm90")) == 2  # 16 and 32 rows a tile
    assert len(ways((64, 65), "sm90")) == 2  # Triton compiles anew for multiples of 16
    assert len(ways((1, 65), "sm90")) == 2  # direct, gathered


def test_warmup_folder_is_private_and_its_manifest_whole():
    moe_ops.warmup(layer(), tokens=[2])
    for folder in (env.cache_dir(), env.cache_dir() / "warmup"):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(the_manifest().stat().st_mode) == 0o600
    env.cache_dir().chmod(0o777)
    moe_ops.warmup(layer(), tokens=[2])
    assert stat.S_IMODE(env.cache_dir().stat().st_mode) == 0o700


def _truncated(text):
    return text[: len(text) // 2]


def _foreign(text):
    content = json.loads(text)
    content["made_with"]["torch"] = "1.0"
    return json.dumps(content)


def _changed(text):
    content = json.loads(text)
    content["jobs"].append("0" * 16)
    return json.dumps(content)


@pytest.mark.parametrize(
    "spoil, reason",
    [(_truncated, "cannot be read"), (_foreign, "other versions"), (_changed, "checksum"), (lambda text: "[]", "read")],
)
def test_warmup_manifest_that_is_spoilt_is_rebuilt(spoil, reason, caplog):
    moe_ops.warmup(layer(), tokens=[2])
    path = the_manifest()
    whole = path.read_text()
    path.write_text(spoil(whole))
    with caplog.at_level(logging.WARNING, "moe_ops"):
        assert moe_ops.warmup(layer(), tokens=[2]).compiled == 1
    assert reason in caplog.text
    assert path.read_text() == whole


def test_warmup_is_repeated_where_compiled_kernels_are_gone(tmp_path, caplog):
    kernels = env.compile_caches()["TRITON_CACHE_DIR"]
    kernels.mkdir()
    (kernels / "kernel").write_text("")
    moe_ops.warmup(layer(), tokens=[2])
    (kernels / "kernel").unlink()
    assert moe_ops.warmup(layer(), tokens=[2]).compiled == 1
    assert "are gone" in caplog.text


def test_warmup_of_other_versions_has_a_manifest_of_its_own(tmp_path):
    old, new = (Manifest(tmp_path, {"torch": version}) for version in ("1", "2"))
    old.write({"a"})
    assert new.read() == set() and old.read() == {"a"}


def test_warmup_names_what_was_not_warmed_once(caplog):
    one = layer("bf16", top_k=1)
    moe_ops.warmup(one, tokens=[2])
    with caplog.at_level(logging.WARNING, "moe_ops"):
        one(torch.randn(2, K).bfloat16())
        assert "not warmed" not in caplog.text
        for _ in range(2):
            one(torch.randn(900, K).bfloat16())
    assert caplog.text.count("T=900 on cpu was not warmed up") == 1


def test_warmup_forms_keep_strides():
    packed = torch.zeros(2, 3, 8, dtype=torch.int32).mT
    form = Form.of(packed)
    assert form.zeros("cpu").stride() == packed.stride() and form.nbytes == packed.nbytes
    fp8 = Form.of(torch.zeros(2, 4, dtype=torch.float8_e4m3fn)).zeros("cpu")
    assert fp8.dtype == torch.float8_e4m3fn and not fp8.view(torch.uint8).any()


def test_warmup_refusals():
    with pytest.raises(ValueError, match="tokens must be counts of at least 1; got 0"):
        moe_ops.warmup(layer(), tokens=[0])
    with pytest.raises(ValueError, match="model must be one with MoELayers"):
        moe_ops.warmup(torch.nn.Linear(2, 2), tokens=[1])


@pytest.mark.slow
def test_warmup_two_processes_at_once_do_the_work_once(tmp_path):
    script = f"""
import sys; sys.path.insert(0, {os.path.dirname(__file__)!r})
from test_warmup import layer
import moe_ops
if __name__ == "__main__":
    print(moe_ops.warmup(layer(), tokens=[2, 40], workers=int(sys.argv[1])).compiled)
"""
    path = tmp_path / "start.py"
    path.write_text(script)
    both = [subprocess.Popen([sys.executable, path, n], stdout=subprocess.PIPE, text=True) for n in ("0", "1")]
    counts = sorted(int(process.communicate(timeout=280)[0]) for process in both)
    assert counts[0] == 0 and counts[1] >= 1
