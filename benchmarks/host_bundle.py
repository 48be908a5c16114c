"""What a GPU host without registry or compiler needs to run attention_forward.py: objects and small wheels.

    python benchmarks/host_bundle.py OUT --gpu h200 [--table DIR] [--python 3.12]

and on the host, in a checkout of this repository:

    PYTHONPATH=OUT/site:. FA4TUNE_OBJECTS=OUT/objects FA4TUNE_TABLE=OUT/table \\
        python benchmarks/attention_forward.py

OUT/objects holds the compiled kernel of every shape (the table's config where there is one, and the default),
OUT/site the packages that torch does not bring, OUT/table a copy of the table.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

from fa4tune.hardware.gpu import load_gpu
from fa4tune.problem import AttentionProblem
from fa4tune.runtime.attention import prepare
from fa4tune.table.store import Table

PACKAGES = ("msgspec", "platformdirs", "filelock", "apache-tvm-ffi", "typing-extensions")


def main() -> int:
    """Write the bundle."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("out", type=Path)
    parser.add_argument("--gpu", default="h200")
    parser.add_argument("--table", type=Path, help="table with the configs (default: the user's)")
    parser.add_argument("--python", default="3.12", help="Python of the host")
    options = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).parent))
    from attention_forward import SHAPES, problem_of

    gpu = load_gpu(options.gpu)
    table = Table(options.table)
    problems: list[AttentionProblem | str] = [
        *map(problem_of, SHAPES),
        "b1_hq1_hk1_sq128_sk128_d128_dv128_bf16_full_fwd",
    ]
    objects = options.out / "objects"
    shutil.rmtree(objects, ignore_errors=True)
    kernels = prepare(problems, gpu=gpu, objects=objects, table=table)
    # the defaults too: what runs where a table is not found or holds a config that a shape cannot use
    prepare(problems, gpu=gpu, objects=objects, table=Table(options.out / "no table", fallback=()))
    shutil.rmtree(options.out / "table", ignore_errors=True)
    if table.directory.is_dir():
        shutil.copytree(table.directory, options.out / "table", ignore=shutil.ignore_patterns("*.lock"))
    digits = options.python.replace(".", "")
    platforms = [f"manylinux_2_{glibc}_x86_64" for glibc in (28, 27, 24, 17)] + ["manylinux2014_x86_64"]
    shutil.rmtree(options.out / "site", ignore_errors=True)
    subprocess.run(
        [
            sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--only-binary=:all:", "--no-compile",
            "--target", str(options.out / "site"), "--python-version", options.python,
            "--implementation", "cp", "--abi", f"cp{digits}", "--abi", "abi3", "--abi", "none",
            *(part for p in platforms for part in ("--platform", p)),
            *(f"{name}=={metadata.version(name)}" for name in PACKAGES),
        ],
        check=True,
    )  # fmt: skip
    size = sum(path.stat().st_size for path in options.out.rglob("*") if path.is_file())
    print(f"{options.out}: {len(kernels)} kernels, {size / 1e6:.1f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
