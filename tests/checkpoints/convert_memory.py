"""Measures the peak host memory of `convert` on a DeepSeek-V4-shaped MXFP4 checkpoint of two layers.

python tests/checkpoints/convert_memory.py --experts 48 --hidden 4096 --intermediate 2048 --arch cpu --work /tmp/work

Prints one JSON line: bytes of the checkpoint, peak over the memory in use before convert, and the bound for it: one
prepared layer, one expert in float32 (its working copies), and what stays mapped of the files between two reopenings.
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path

import torch

MAPPED = 16 << 20  # read before the files are reopened; one tensor more may be under way


def write(root: Path, experts: int, K: int, I: int) -> int:
    """Random codes, exponents within a range that one fp8 tile holds, one file a layer. Returns bytes."""
    from safetensors.torch import save_file

    root.mkdir(parents=True)
    where, total = {}, 0
    for layer in range(2):
        tensors = {}
        prefix = f"layers.{layer}.ffn."
        for expert in range(experts):
            for part, (N, columns) in {"w1": (I, K), "w3": (I, K), "w2": (K, I)}.items():
                stem = f"{prefix}experts.{expert}.{part}"
                tensors[f"{stem}.weight"] = torch.randint(-128, 128, (N, columns // 2), dtype=torch.int8)
                scale = torch.randint(115, 125, (N, columns // 32), dtype=torch.uint8)
                tensors[f"{stem}.scale"] = scale.view(torch.float8_e8m0fnu)
        tensors[f"{prefix}gate.weight"] = torch.randn(experts, K).bfloat16()
        file = f"model-{layer + 1:05d}-of-00002.safetensors"
        save_file(tensors, root / file)
        where |= dict.fromkeys(tensors, file)
        total += (root / file).stat().st_size
    config = dict(model_type="deepseek_v4", n_routed_experts=experts, hidden_size=K, moe_intermediate_size=I)
    config |= dict(expert_dtype="fp4", quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]})
    (root / "config.json").write_text(json.dumps(config))
    (root / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    return total


def resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def measure(work: Path, arch: str) -> dict:
    """Converts in this process and returns the peak over what was resident before."""
    from moe_ops.checkpoints import convert

    torch.set_num_threads(1)
    before, start = resident(), time.perf_counter()
    convert(work / "source", work / "target", arch=arch, progress=False)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    seconds = time.perf_counter() - start
    layer = max(file.stat().st_size for file in (work / "target").glob("*.safetensors"))
    return dict(peak_bytes=peak - before, layer_bytes=layer, seconds=round(seconds, 1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("experts", 48), ("hidden", 4096), ("intermediate", 2048)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--arch", default="cpu")
    parser.add_argument("--work", type=Path, required=True, help="an empty directory with room for both")
    parser.add_argument("--measure", action="store_true", help="only convert what is there; run in a fresh process")
    args = parser.parse_args()
    if args.measure:
        print(json.dumps(measure(args.work, args.arch)))
        return
    written = write(args.work / "source", args.experts, args.hidden, args.intermediate)
    command = [sys.executable, __file__, "--measure", "--work", str(args.work), "--arch", args.arch]
    result = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    expert = 3 * args.hidden * args.intermediate * 4
    bound = result["layer_bytes"] + expert + MAPPED + args.hidden * args.intermediate // 2
    print(json.dumps(dict(checkpoint_bytes=written, bound_bytes=bound, **result)))


if __name__ == "__main__":
    main()
