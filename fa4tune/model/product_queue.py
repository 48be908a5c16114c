"""Products of roles that do not take turns queue up at the tensor cores, first come, first served.

Roles that issue their products as soon as they may then fall into one order and keep it, the same that an
order of turns would give them, but without handing anything over.
"""

from __future__ import annotations

from dataclasses import replace

from fa4tune.kernels.plan import Loop, Order
from fa4tune.model.skeleton import QUEUE

_QUEUED: dict[int, tuple[Loop, Loop | None]] = {}
"""By identity, as skeletons."""


def queued(loop: Loop) -> Loop | None:
    """``loop`` with the matrix products of its roles taken in a fixed order, first come, first served.

    None where there is no choice: one role has all products, or roles take turns anyway.
    """
    found = _QUEUED.get(id(loop))
    if found is not None and found[0] is loop:
        return found[1]
    order = _queue_of(loop)
    answer = replace(loop, orders=(*loop.orders, order)) if order else None
    if len(_QUEUED) > 10_000:
        _QUEUED.clear()
    _QUEUED[id(loop)] = (loop, answer)
    return answer


def _queue_of(loop: Loop) -> Order | None:
    """What each role issues first in an iteration, role after role."""
    role_of = {operation.name: operation.role for operation in loop.body}
    products = {operation.name for operation in loop.body if operation.mma and operation.asynchronous}
    names: list[str] = []
    lags: list[int] = []
    roles = 0
    for order in loop.orders:
        leading = 0
        while leading < len(order.operations) and order.operations[leading] in products:
            leading += 1
        if not leading:
            continue
        if any(role_of[name] != order.owner for name in order.operations):
            return None
        roles += 1
        names += order.operations[:leading]
        lags += (order.lags or (0,) * len(order.operations))[:leading]
    return Order(QUEUE, tuple(names), tuple(lags)) if roles > 1 else None
