"""Which hardware file describes a CUDA device."""

from __future__ import annotations

import dataclasses
from functools import cache

from fa4tune.hardware.gpu import ARCHITECTURES, Gpu, gpu_names, load_gpu


@cache
def detect_gpu(index: int = 0) -> Gpu | None:
    """The hardware of CUDA device ``index``: the file of the same architecture, SM count and nearest memory.

    A part with another SM count than any file takes the nearest file with that count put in, so that its
    tables stay its own. None where no kernel exists for the architecture.
    """
    import torch

    properties = torch.cuda.get_device_properties(index)
    arch = f"sm_{properties.major}{properties.minor}a"
    if arch not in ARCHITECTURES:
        return None
    fitting = [gpu for gpu in map(load_gpu, gpu_names()) if gpu.arch == arch]
    sms = properties.multi_processor_count
    nearest = min(
        fitting, key=lambda gpu: (abs(gpu.sm_count - sms), abs(gpu.hbm_bytes - properties.total_memory))
    )
    if nearest.sm_count == sms:
        return nearest
    return dataclasses.replace(nearest, name=f"{nearest.name}-{sms}sm", sm_count=sms)


def local_gpu() -> Gpu | None:
    """The hardware of this machine's first CUDA device; None without one, or of an unknown architecture."""
    import torch

    return detect_gpu(0) if torch.cuda.is_available() else None
