#!/usr/bin/env bash
# The built wheel in a clean environment, far from the checkout: README's example, the commands, transformers' models.
# Not a part of the test suite: it installs torch, which takes minutes. Usage: tests/wheel_check.sh [DIRECTORY]
# DIRECTORY (default: a temporary one, removed at the end) keeps the environment and the chart.
set -euo pipefail

root=$(cd "$(dirname "$0")/.." && pwd)
if [ $# -gt 0 ]; then
    mkdir -p "$1"
    place=$(cd "$1" && pwd)
else
    place=$(mktemp -d)
    trap 'rm -rf "$place"' EXIT
fi
say() { printf '\n== %s\n' "$*"; }

say "wheel"
cp -r "$root/moe_ops" "$root/meta" "$root/csrc_stubs" "$root/pyproject.toml" "$root/README.md" "$root/LICENSE" \
    "$(mkdir -p "$place/source" && echo "$place/source")"
python3 -m venv "$place/venv"
pip() { "$place/venv/bin/python" -m pip --disable-pip-version-check "$@"; }
pip wheel --quiet --no-deps --wheel-dir "$place/wheels" "$place/source"
wheel=$(echo "$place"/wheels/*.whl)
echo "$(basename "$wheel"), $(stat -c %s "$wheel") bytes"

say "install"
cd "$place" # nothing of the checkout on sys.path from here on
pip install --quiet -r "$root/requirements-ci.txt" "$wheel[cli,plot,hf]"
export PATH="$place/venv/bin:$PATH"
unset PYTHONPATH
python -c 'import moe_ops, sys, torch; print("moe_ops", moe_ops.__version__, "from", moe_ops.__file__, "| torch", torch.__version__)
assert moe_ops.__file__.startswith(sys.prefix), moe_ops.__file__'

say "README's first example"
awk '/^```python$/ { inside = 1; next } /^```$/ { if (inside) exit } inside' "$root/README.md" > readme.py
python readme.py

say "moe-ops doctor"
moe-ops doctor
say "moe-ops plan --chart"
moe-ops plan -E 256 -K 7168 -I 2048 --top-k 8 --world 8 -T 4096 --arch sm90 --chart "$place/plan.png"
test "$(stat -c %s "$place/plan.png")" -gt 10000
say "moe-ops verify"
moe-ops verify

say "transformers: Qwen3-MoE and gpt-oss, small, against eager experts"
cp "$root/tests/wheel_check_transformers.py" check.py
python check.py
say "all of it passed"
