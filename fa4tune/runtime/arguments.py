"""From a kernel's argument names to a call: one place that knows what each runtime argument means.

Standard library only, because this file travels to machines that measure.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from fa4tune.errors import LaunchError

UNBOUNDED = 1 << 30
"""Window size that stands for no bound: more keys than any sequence has."""

_TENSORS = {"mQ": "q", "mK": "k", "mV": "v", "mO": "out", "mLSE": "lse"}


def forward_caller(
    function: Callable[..., Any],
    names: Sequence[str],
    *,
    sm_count: int,
    window: tuple[int | None, int | None] = (None, None),
) -> Callable[..., None]:
    """A forward kernel's host function as ``call(q, k, v, out, lse, softmax_scale)``.

    Args:
        function: what :func:`fa4tune.runtime.launcher.load_library` gave.
        names: the host function's arguments in order, as the compiled kernel's signature lists them.
        sm_count: SMs of the GPU that will run it; persistent schedulers launch that many CTAs.
        window: keys visible left and right of the diagonal, for kernels compiled for windows.

    Raises:
        LaunchError: the kernel has an argument that this version does not know.
    """
    fixed = {
        "sm_count": sm_count,
        "window_left": UNBOUNDED if window[0] is None else window[0],
        "window_right": UNBOUNDED if window[1] is None else window[1],
    }
    unknown = [n for n in names if n not in _TENSORS and n not in fixed and n != "softmax_scale"]
    if unknown:
        raise LaunchError(
            f"the kernel takes {', '.join(unknown)}, which this fa4tune does not know; compile it again"
        )
    words = [_TENSORS.get(n) or ("softmax_scale" if n == "softmax_scale" else str(fixed[n])) for n in names]
    # A generated lambda costs one Python call a launch; packing a list would cost as much as the launch.
    source = f"lambda q, k, v, out, lse, softmax_scale: function({', '.join(words)})"
    call: Callable[..., None] = eval(source, {"function": function})  # names are from the tables above
    return call
