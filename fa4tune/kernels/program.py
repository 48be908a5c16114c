"""From (problem, config, hardware) to the program of kernel plans that one call launches."""

from __future__ import annotations

from fa4tune.errors import InfeasibleError
from fa4tune.hardware.gpu import Gpu
from fa4tune.kernels.config import KernelConfig, SM90ForwardConfig, SM100ForwardConfig
from fa4tune.kernels.plan import KernelPlan, Program
from fa4tune.problem import AttentionProblem


def build_plan(problem: AttentionProblem, config: KernelConfig, gpu: Gpu) -> KernelPlan:
    """The plan of the kernel that serves ``problem`` with ``config`` on ``gpu``.

    Raises:
        InfeasibleError: no such kernel can run; every reason is listed with its numbers.
    """
    if problem.direction != "fwd":
        raise InfeasibleError(str(problem), (f"direction {problem.direction!r} has no kernel yet; use fwd",))
    if isinstance(config, SM90ForwardConfig) and gpu.arch == "sm_90a":
        from fa4tune.kernels.sm90 import forward_plan as sm90

        return sm90.build_plan(problem, config, gpu)
    if isinstance(config, SM100ForwardConfig) and gpu.arch in ("sm_100a", "sm_103a"):
        from fa4tune.kernels.sm100 import forward_plan as sm100

        return sm100.build_plan(problem, config, gpu)
    raise InfeasibleError(
        str(problem), (f"a {config.family} config does not run on {gpu.name} ({gpu.arch})",)
    )


def build_program(problem: AttentionProblem, config: KernelConfig, gpu: Gpu) -> Program:
    """The program of ``problem``: one kernel forward, no workspace.

    Raises:
        InfeasibleError: as :func:`build_plan`.
    """
    return Program((build_plan(problem, config, gpu),))
