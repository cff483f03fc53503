"""What does flow control cost a step?

``step_us``: everything that a step of a tool passes, from the loop guard over the gate (a breaker, a bulkhead, a rate
of the tool and one of the tenant) and the budgets (of the node, a tenant with a daily limit, the root and a child) to
its outcome, which settles and adapts. ``model_us``: the same for a model call with tokens and an adaptive limit, and
without budgets. ``gate_us``: the request of a step alone. ``wait_us``: a call that has to wait and is granted later,
events included. ``names_us``: a step when ten thousand tenants take turns. ``admit_us``: a run's admission and its
leaving.

All of it is Python on one core, in virtual time. The baseline is what a program without any of this would use at least:
``semaphore_us``, an uncontended asyncio.Semaphore and a deque of the last minute's calls.
"""

import asyncio
from collections import deque
from collections.abc import Callable

from agentrt.flow.admission import Admission, Applicant
from agentrt.flow.amounts import ONE_TOOL_CALL
from agentrt.flow.buckets import RateLimit
from agentrt.flow.budgets import Ledger
from agentrt.flow.decisions import Scope
from agentrt.flow.gate import SUCCESS, Call, Gate, Ticket, Waiting
from agentrt.flow.limits import BulkheadRule, GateLimits, RateRule
from agentrt.flow.loopguard import LoopGuard, LoopLimits
from perf.report import Report, machine
from perf.timing import clock, median_ns

_START_NS = 1_700_000_000 * 10**9
_STEP_NS = 100_000
_MANY = 10**9
_LIMITS = GateLimits(
    rates=(
        RateRule(Scope.TOOL, "*", RateLimit(_MANY)),
        RateRule(Scope.TENANT, "*", RateLimit(_MANY)),
        RateRule(Scope.PROVIDER, "*", RateLimit(_MANY)),
        RateRule(Scope.PROVIDER, "*", RateLimit(_MANY, unit="tokens")),
    ),
    bulkheads=(BulkheadRule(Scope.CLASS, "*", _MANY),),
    names_max=50_000,
)
_DIGESTS = [index.to_bytes(16, "big") for index in range(64)]


def _step(tenants: int) -> Callable[[int], float]:
    gate, guard = Gate(_LIMITS), LoopGuard(LoopLimits(iterations=0))
    ledger = Ledger(lambda id: {"tool_calls": _MANY, "tool_calls/day": _MANY} if len(id) < 3 else {})
    root = ledger.open("root", "tenant", "agent", {"tool_calls": _MANY}, None, "root", _START_NS)
    entry = ledger.open("run", "tenant", "agent", {"tool_calls": _MANY}, root, "root", _START_NS)
    names = [f"tenant{index}" for index in range(tenants)]
    now_ns, number = _START_NS, 0

    def loop(loops: int) -> float:
        nonlocal now_ns, number
        start = clock()
        for _ in range(loops):
            number += 1
            now_ns += _STEP_NS
            guard.step("root", "run", "agent", "search", _DIGESTS[number & 63])
            ticket = gate.request(Call(names[number % tenants], 1, "tool", "search"), now_ns)
            ledger.reserve(entry, ONE_TOOL_CALL, now_ns)
            gate.finish(ticket, SUCCESS, now_ns + 1000)  # type: ignore[arg-type]
            ledger.settle(entry, ONE_TOOL_CALL, ONE_TOOL_CALL, now_ns)
        return clock() - start

    return loop


def _model() -> Callable[[int], float]:
    gate = Gate(_LIMITS)
    now_ns = _START_NS

    def loop(loops: int) -> float:
        nonlocal now_ns
        start = clock()
        for _ in range(loops):
            now_ns += _STEP_NS
            call = Call("tenant", 1, "model", provider="provider", model="model", tokens=1000)
            ticket = gate.request(call, now_ns)
            gate.finish(ticket, SUCCESS, now_ns + 1000)  # type: ignore[arg-type]
        return clock() - start

    return loop


def _request() -> Callable[[int], float]:
    gate = Gate(_LIMITS)
    call = Call("tenant", 1, "tool", "search")
    now_ns = _START_NS

    def loop(loops: int) -> float:
        nonlocal now_ns
        tickets: list[Ticket] = []
        start = clock()
        for _ in range(loops):
            now_ns += _STEP_NS
            tickets.append(gate.request(call, now_ns))  # type: ignore[arg-type]
        taken = clock() - start
        for ticket in tickets:
            gate.finish(ticket, SUCCESS, now_ns)
        return taken

    return loop


def _wait() -> Callable[[int], float]:
    """One place, always taken: each call waits for the one before it."""
    gate = Gate(GateLimits(bulkheads=(BulkheadRule(Scope.TOOL, "search", 1),)))
    call = Call("tenant", 1, "tool", "search")
    holder = gate.request(call, _START_NS)
    assert isinstance(holder, Ticket)
    state = [holder]

    def loop(loops: int) -> float:
        start = clock()
        for _ in range(loops):
            waiting = gate.request(call, _START_NS)
            assert isinstance(waiting, Waiting)
            state[0] = gate.finish(state[0], SUCCESS, _START_NS).tickets[0]
        return clock() - start

    return loop


def _admit() -> Callable[[int], float]:
    admission = Admission()
    who = Applicant(1, "tenant", size_bytes=100)

    def loop(loops: int) -> float:
        start = clock()
        for _ in range(loops):
            admission.enter(who, _START_NS)
            admission.leave(who, _START_NS)
        return clock() - start

    return loop


def _semaphore() -> Callable[[int], float]:
    async def pass_many(loops: int) -> float:
        semaphore, lately, now_ns = asyncio.Semaphore(100), deque[int](), _START_NS
        start = clock()
        for _ in range(loops):
            now_ns += _STEP_NS
            async with semaphore:
                while lately and lately[0] <= now_ns - 60 * 10**9:
                    lately.popleft()
                if len(lately) < _MANY:
                    lately.append(now_ns)
        return clock() - start

    return lambda loops: asyncio.run(pass_many(loops))


def run(tiny: bool) -> Report:
    measures = {
        "step_us": _step(1),
        "model_us": _model(),
        "gate_us": _request(),
        "wait_us": _wait(),
        "names_us": _step(10 if tiny else 10_000),
        "admit_us": _admit(),
    }
    figures = {name: median_ns(loop, tiny=tiny) / 1000 for name, loop in measures.items()}
    baselines = {"semaphore_us": median_ns(_semaphore(), tiny=tiny) / 1000}
    return Report("flow", figures, baselines, machine())
