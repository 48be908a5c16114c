"""Record what the Hopper forward gives on a real GPU, for the emulator to be compared with.

    python tests/data/record_sm90_forward.py export DIR    where the compiler is: kernels and inputs
    python DIR/record.py OUT.safetensors                   where the GPU is: no compiler needed

Inputs come in two kinds. ``exact``: every product, sum and power of two is exact by construction, so O
must be bit-equal. Scores are small integers in log2 units. Under a full mask the row sum is a power of
two. Under a causal mask the score is minus the distance to the diagonal, and V is zero but for eight
adjacent keys, so that partial sums of O fit in 24 bits. ``gaussian``: ordinary values, which round.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from pathlib import Path

import torch
from torch import Tensor

HEADS, KV_HEADS = 2, 1
CASES = [
    (head_dim, mask, text)
    for head_dim in (64, 128)
    for mask in ("full", "causal")
    for text in ("", "exp2_share=0.125,rescale_threshold=8")
]
"""(head dim, mask, change of the default config)."""


def exact_scale() -> float:
    """A float32 softmax scale whose float32 product with log2(e) is exactly 1."""
    log2_e = torch.tensor(1.4426950408889634, dtype=torch.float32)
    scale = torch.tensor(0.6931471805599453, dtype=torch.float32)
    for step in range(-4, 5):
        near = scale.view(torch.int32).add(step).view(torch.float32)
        if float(near * log2_e) == 1.0:
            return float(near)
    raise AssertionError("no float32 scale gives exactly 1")


def inputs(kind: str, head_dim: int, mask: str) -> tuple[Tensor, Tensor, Tensor, float]:
    """q, k, v in bfloat16 (batch, seqlen, heads, head_dim) and the softmax scale."""
    generator = torch.Generator().manual_seed(head_dim + (mask == "causal"))
    if kind == "gaussian":
        rows, keys = 130, 200
        q, k, v = (
            torch.randn((1, n, h, head_dim), generator=generator, dtype=torch.float32)
            for n, h in ((rows, HEADS), (keys, KV_HEADS), (keys, KV_HEADS))
        )
        return q.bfloat16(), k.bfloat16(), v.bfloat16(), head_dim**-0.5
    q = torch.zeros((1, 256, HEADS, head_dim))
    k = torch.zeros((1, 256, KV_HEADS, head_dim))
    v = torch.randint(-8, 9, (1, 256, KV_HEADS, head_dim), generator=generator).float()
    position = torch.arange(256, dtype=torch.float32)
    if mask == "full":
        # 64 keys weigh 1, 128 weigh 1/2, 64 nothing: the row sum is 128, and the maximum grows on the way
        q[..., 0] = 1.0
        k[0, :128, :, 0], k[0, 128:192, :, 0] = -1.0, -200.0
    else:
        q[0, :, :, 0], q[0, :, :, 1] = 1.0, -position[:, None]
        k[0, :, :, 0], k[0, :, :, 1] = position[:, None], 1.0
        v[:, :120], v[:, 128:] = 0.0, 0.0
    return q.bfloat16(), k.bfloat16(), v.bfloat16(), exact_scale()


def export(directory: Path) -> None:
    """Compile the cases and write a directory that runs without this repository."""
    from fa4tune.hardware.gpu import load_gpu
    from fa4tune.kernels.compile import compile_many
    from fa4tune.kernels.config import default_config
    from fa4tune.kernels.kernel_class import KernelClass
    from fa4tune.problem import AttentionProblem
    from fa4tune.search.transfer import VENDORED, add_wheel, vendor

    gpu = load_gpu("h200")
    wanted = {}
    for head_dim, mask, text in CASES:
        problem = AttentionProblem(1, HEADS, KV_HEADS, 130, 200, head_dim, head_dim, "bf16", mask)
        config = default_config(problem, gpu.arch).with_text(text)
        wanted[KernelClass.from_problem(problem, config, gpu.arch)] = (head_dim, mask, str(config))
    directory.mkdir(parents=True, exist_ok=True)
    cases = []
    for kernel_class, kernel in compile_many(wanted):
        if isinstance(kernel, Exception):
            raise kernel
        assert kernel.library_path is not None
        shutil.copyfile(kernel.library_path, directory / f"{kernel.key}.so")
        head_dim, mask, config = wanted[kernel_class]
        cases.append(
            {
                "head_dim": head_dim,
                "mask": mask,
                "config": config,
                "object": f"{kernel.key}.so",
                "symbol": kernel.symbol,
                "arguments": [a.name for a in kernel.signature],
                "dsl": f"{kernel.dsl_version} {kernel.flavour}",
            }
        )
    (directory / "cases.json").write_text(json.dumps(cases, indent=1))
    vendor(directory / "lib" / "fa4tune", VENDORED)
    add_wheel(directory / "wheels", "3.12", print)
    shutil.copyfile(__file__, directory / "record.py")


def record(directory: Path, out: Path) -> None:
    """Run the cases on the GPU and write inputs, O and LSE with provenance."""
    sys.path.insert(0, str(directory / "lib"))
    from safetensors.torch import save_file

    from fa4tune.search.device import CudaBackend

    backend = CudaBackend()
    tensors: dict[str, Tensor] = {}
    cases = json.loads((directory / "cases.json").read_text())
    for case in cases:
        kernel = backend.load(directory, case)
        for kind in ("exact", "gaussian"):
            q, k, v, scale = inputs(kind, case["head_dim"], case["mask"])
            given = f"{kind}.d{case['head_dim']}.{case['mask']}"
            tensors.update({f"{given}.q": q, f"{given}.k": k, f"{given}.v": v})
            tensors[f"{given}.scale"] = torch.tensor(scale, dtype=torch.float32)
            dev = [t.cuda() for t in (q, k, v)]
            o = torch.full((1, q.shape[1], HEADS, v.shape[3]), float("nan"), dtype=q.dtype, device="cuda")
            lse = torch.full((1, HEADS, q.shape[1]), float("nan"), device="cuda")
            kernel(*dev, o, lse, scale)
            torch.cuda.synchronize()
            name = f"{given}/{case['config']}"
            tensors[f"{name}.o"], tensors[f"{name}.lse"] = o.cpu(), lse.cpu()
    provenance = {
        **{key: str(value) for key, value in backend.environment().items()},
        "cutlass_dsl": cases[0]["dsl"],
        "measured_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    save_file({name: t.contiguous() for name, t in tensors.items()}, out, metadata=provenance)


if __name__ == "__main__":
    if sys.argv[1] == "export":
        export(Path(sys.argv[2]))
    else:
        record(Path(__file__).parent, Path(sys.argv[1]))
