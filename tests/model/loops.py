"""Hand-made and random loops, and a GPU on which their periods can be added up."""

from __future__ import annotations

import dataclasses
import random

from fa4tune.hardware.gpu import Gpu, load_gpu
from fa4tune.kernels.plan import Dependency, Loop, Mma, Operation, Order, Unit, Work
from fa4tune.model.pipeline import Timed, solve
from fa4tune.model.skeleton import skeleton
from fa4tune.model.timing import Duration, rates_of


def plain_gpu(**changes: float) -> Gpu:
    """An H200 without latencies or hindrance beside products: periods can be added up by hand."""
    none = (
        *("mma_latency_clk", "mma_start_clk", "barrier_latency_clk", "turn_latency_clk", "copy_latency_clk"),
        *("arithmetic_latency_clk", "smem_conflict"),
    )
    whole = (
        *("warp_issue_per_clk", "exp_overlap", "contention", "section_contention"),
        *("exp_beside_mma", "alu_beside_mma", "fma_beside_mma"),
    )
    numbers = {**dict.fromkeys(none, 0.0), **dict.fromkeys(whole, 1.0), **changes}
    return dataclasses.replace(load_gpu("h200"), **numbers)  # type: ignore[arg-type]


def exponentials(name: str, role: str, cycles: int) -> Operation:
    """A section of ``cycles``."""
    return Operation(name, role, Unit.EXP, Work(exp=16 * cycles))


def product(name: str, role: str, cycles: int) -> Operation:
    """A matrix product that holds the tensor cores for ``cycles``."""
    return Operation(
        name, role, Unit.TENSOR, Work(mma_flops=4096 * cycles), (Mma(64, 8, 16, 1),), asynchronous=True
    )


def durations_of(loop: Loop, gpu: Gpu, warps: int = 4) -> list[Duration]:
    """Durations of roles of ``warps`` warps."""
    return [rates_of(gpu).duration(operation, warps) for operation in loop.body]


def solved(loop: Loop, gpu: Gpu, copies: int = 1, warps: int = 4) -> Timed:
    """The steady state of a loop whose operations all run in every iteration."""
    ones = [1.0] * len(loop.body)
    return solve(skeleton(loop), durations_of(loop, gpu, warps), ones, rates_of(gpu), copies)


def chain(groups: int, mma: int, softmax: int) -> Loop:
    """Roles that each alternate a matrix product and a softmax that needs it."""
    body, dependencies, orders = [], [], []
    for g in range(groups):
        body += [product(f"qk{g}", f"mma{g}", mma), exponentials(f"exp{g}", f"mma{g}", softmax)]
        dependencies.append(Dependency(f"qk{g}", f"exp{g}"))
        orders.append(Order(f"mma{g}", (f"qk{g}", f"exp{g}")))
    return Loop(tuple(body), tuple(dependencies), tuple(orders))


def random_attention(rng: random.Random, turns: str = "none") -> Loop:
    """Warpgroups of random work: QK, softmax and PV, pipelined or not, fed by rings of loads.

    Args:
        rng: draws the work.
        turns: who takes turns at the tensor cores: ``none``, ``qk`` (PV does not) or ``all``.
    """
    groups, stages, overlap = rng.randint(1, 4), rng.randint(1, 3), rng.random() < 0.5 or turns == "all"
    work = [rng.randint(20, 900) for _ in range(4)]
    equal = rng.random() < 0.5

    def cycles(kind: int) -> int:
        return work[kind] if equal else max(1, round(work[kind] * rng.uniform(0.5, 1.5)))

    copied = Work(
        global_read_bytes=64 * rng.randint(10, 900), smem_tma_write_bytes=128 * rng.randint(10, 300)
    )
    body = [Operation(name, "load", Unit.L2, copied, asynchronous=True) for name in ("load_k", "load_v")]
    dependencies: list[Dependency] = []
    orders = [Order("load", ("load_k", "load_v"), (0, 1 if overlap else 0))]
    for g in range(groups):
        role, qk, pv, first, last = f"mma{g}", f"qk{g}", f"pv{g}", f"max{g}", f"exp{g}"
        body += [product(qk, role, cycles(0)), product(pv, role, cycles(1))]
        body += [exponentials(first, role, cycles(2)), exponentials(last, role, cycles(3))]
        dependencies += [
            Dependency("load_k", qk),
            Dependency("load_v", pv),
            Dependency(qk, first),
            Dependency(last, pv),
            Dependency(qk, "load_k", stages),
            Dependency(pv, "load_v", stages),
        ]
        if overlap:
            dependencies.append(Dependency(pv, last, 1))
            orders.append(Order(role, (qk, pv, first, last), (0, 1, 0, 0)))
        else:
            dependencies.append(Dependency(pv, qk, 1))
            orders.append(Order(role, (qk, first, last, pv)))
    if turns == "qk" and groups > 1:
        orders.append(Order("turn", tuple(f"qk{g}" for g in range(groups))))
    if turns == "all" and groups > 1:
        names = tuple(f"{kind}{g}" for g in range(groups) for kind in ("qk", "pv"))
        orders.append(Order("turn", names, (0, 1) * groups))
    return Loop(tuple(body), tuple(dependencies), tuple(orders))
