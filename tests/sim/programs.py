"""Random programs, and the one agent function that runs them.

A program is a list of statements made from a seed; what it asks for depends on nothing but its input and the answers
so far: every request carries a checksum of all answers seen, so a replay that goes astray is noticed at the next one.
"""

import random
from collections.abc import Generator
from typing import Any
from zlib import crc32

import msgspec

from tests.sim.guests import Code, Ctx, ProgramError

Statement = tuple[Any, ...]
Program = list[Statement]
Env = dict[str, Any]

TOPICS = ("t0", "t1", "t2")
LOCKS = ("l0", "l1")
_TOOLS = ("hash", "put", "put", "put", "ask", "once", "fail", "boom", "brief", "brief_ask")


class Features:
    """What the programs of a world may contain: weights by statement."""

    def __init__(self, chance: random.Random) -> None:
        weights = {
            "tool": 6,
            "par": 3,
            "race": 2,
            "sleep": 2,
            "event": 2,
            "send": 2,
            "approval": 1,
            "spawn": 3,
            "join": 3,
            "lock": 2,
            "emit": 2,
            "checkpoint": 1,
            "unwind": 2,
            "foreign": 1,
            "fail": 0.3,
            "bad": 0.4,
            "log": 0.3,
            "clock": 0.5,
            "branch": 1,
        }
        keep = chance.choice((0.3, 0.6, 1.0))
        # Every world has some of them only: what meets is met more often.
        self.weights = {name: weight for name, weight in weights.items() if name == "tool" or chance.random() < keep}
        self.contended = chance.random() < 0.15
        if self.contended:  # who holds a lock waits, joins and is killed meanwhile, and others want it
            self.weights = {"tool": 1, "sleep": 3, "spawn": 3, "join": 3, "lock": 6}
        self.tools = tuple(name for name in _TOOLS if chance.random() < 0.7) or ("put",)
        self.long = chance.random() < 0.2  # sleeps and time-outs of minutes
        self.keys = chance.choice((("",), ("", "k")))


def make_program(chance: random.Random, features: Features, agents_below: int, size: int) -> Program:
    """At most ``size`` statements; it spawns only agents with a number of at least ``len(agents) - agents_below``."""
    return _block(chance, features, agents_below, size, top=True)


def _block(chance: random.Random, features: Features, below: int, size: int, *, top: bool = False) -> Program:
    names = list(features.weights)
    weights = list(features.weights.values())
    return [
        statement
        for name in chance.choices(names, weights, k=chance.randint(1, size))
        if (statement := _statement(name, chance, features, below, top)) is not None
    ]


def _seconds(chance: random.Random, features: Features) -> float:
    longest = 60.0 if features.long and chance.random() < 0.3 else 3.0
    return round(chance.choice((0.0, 0.001, longest)) * chance.random(), 6)


def _timeout(chance: random.Random, features: Features) -> float | None:
    return None if chance.random() < 0.5 else _seconds(chance, features)


def _statement(name: str, chance: random.Random, features: Features, below: int, top: bool) -> Statement | None:
    if name == "tool":
        return ("tool", chance.choice(features.tools))
    if name == "par":
        subs = [
            sub
            for kind in chance.choices(("tool", "sleep", "event", "send", "spawn", "emit"), (6, 2, 1, 1, 1, 1), k=3)
            if kind in features.weights and (sub := _statement(kind, chance, features, below, False)) is not None
        ]
        if not subs:
            return None
        # How many answers it waits for, and whether it abandons the rest.
        return ("par", subs, chance.randint(1, len(subs)), chance.random() < 0.7)
    if name == "race":
        return ("par", [("tool", chance.choice(features.tools)), ("sleep", 0.01 * chance.random())], 1, True)
    if name == "sleep":
        return ("sleep", _seconds(chance, features))
    if name == "event":
        topic = None if chance.random() < 0.3 else chance.choice(TOPICS)
        key = "" if topic is None else chance.choice(features.keys)
        return ("event", topic, key, _timeout(chance, features))
    if name == "send":
        where = chance.choice(("topic", "topic", "child", "self", "parent"))
        return ("send", where, chance.choice(TOPICS), chance.choice(features.keys), chance.random() < 0.2)
    if name == "approval":
        return ("approval", _timeout(chance, features))
    if name == "spawn":
        if not below:
            return None
        return ("spawn", chance.randint(1, below), chance.random() < 0.3, chance.choice((None, 0, 2)))
    if name == "join":
        return ("join", chance.random() < 0.3)
    if name == "lock":
        size = (4 if features.contended else 2) if chance.random() < 0.8 else 0
        body = _block(chance, features, below, size) if size else []
        if features.contended and below and chance.random() < 0.5:
            body += [("spawn", chance.randint(1, below), False, chance.choice((None, 2, 3))), ("join", True)]
        return ("lock", chance.choice(LOCKS), _timeout(chance, features), body, chance.random() < 0.8)
    if name == "foreign":
        return ("foreign", _block(chance, features, below, 2), chance.random() < 0.8)
    if name == "unwind":
        return ("unwind", tuple(chance.choices(("put", "once", "hash", "emit", "release", "sleep", "boom"), k=2)))
    if name == "bad":
        return ("bad", chance.choice(("unknown", "args", "sleep", "join", "release", "model", "json", "send")))
    if name == "branch":
        return ("branch", _block(chance, features, below, 2), _block(chance, features, below, 2))
    if name == "checkpoint" and not top:
        return None
    return (name,)


def agent_of(program: Program, number: int) -> Any:
    """The agent that runs it. Its input is JSON; a child's number is its parent's and more."""

    def agent(ctx: Ctx, input: Any) -> Code:
        env: Env = ctx.restored or {"acc": crc32(repr(input).encode()), "pc": 0, "children": [], "unwind": []}
        env["number"], env["input"] = number, input
        for which in env["unwind"]:
            ctx.on_unwind(_handler(tuple(which), env))
        for statement in program[env["pc"] :]:
            env["pc"] += 1
            yield from _execute(ctx, env, statement)
        return env["acc"]

    return agent


def _note(env: Env, ok: bool, payload: bytes) -> None:
    env["acc"] = crc32(payload, env["acc"] * 2 + ok & 0xFFFFFFFF)


def _ask(ctx: Ctx, env: Env, statement: Statement) -> int:
    """Submit one step."""
    kind = statement[0]
    if kind == "tool":
        return ctx.op("tool.call", tool=statement[1], args={"acc": env["acc"]})
    if kind == "sleep":
        return ctx.op("timer.sleep", seconds=statement[1])
    if kind == "event":
        return ctx.op("event.wait", topic=statement[1], key=statement[2], timeout_s=statement[3])
    if kind == "send":
        _, where, topic, key, same = statement
        to: dict[str, Any] = {"topic": topic, "key": key}
        if where == "self" or (where == "child" and not env["children"]):
            to = {"run_id": ctx.run_id}
        elif where == "child":
            to = {"run_id": env["children"][-1][0]}
        elif where == "parent" and isinstance(env["input"], dict) and env["input"].get("parent"):
            to = {"run_id": env["input"]["parent"]}
        if same:
            to["id"] = f"same-{env['number']}"
        return ctx.op("event.send", data=env["acc"], **to)
    if kind == "spawn":
        _, step, detached, tier = statement
        input = {"parent": ctx.run_id, "acc": env["acc"]}
        return ctx.op("run.spawn", agent=f"a{env['number'] + step}", input=input, detached=detached, tier=tier)
    assert kind == "emit"
    return ctx.op("emit", data=env["acc"])


def _read(ctx: Ctx, env: Env, statement: Statement, handle: int) -> tuple[bool, Any]:
    ok, payload = ctx.read(handle)
    _note(env, ok, payload)
    value = msgspec.json.decode(payload)
    if statement[0] == "spawn" and ok:
        env["children"].append([value["run_id"], statement[2]])
    return ok, value


def _one(ctx: Ctx, env: Env, statement: Statement) -> Generator[tuple[int, ...], int, tuple[bool, Any]]:
    handle = _ask(ctx, env, statement)
    yield (handle,)
    return _read(ctx, env, statement, handle)


def _execute(ctx: Ctx, env: Env, statement: Statement) -> Code:
    kind = statement[0]
    if kind in ("tool", "sleep", "event", "send", "spawn", "emit"):
        yield from _one(ctx, env, statement)
    elif kind == "par":
        _, subs, count, abandons = statement
        open_steps = {_ask(ctx, env, sub): sub for sub in subs}
        for _ in range(count):
            answered = yield tuple(open_steps)
            _read(ctx, env, open_steps.pop(answered), answered)
        if open_steps and abandons:
            ctx.abandon(list(open_steps))
    elif kind == "approval":
        handle = ctx.op("approval.request", question="may I?", timeout_s=statement[1])
        yield (handle,)
        _note(env, *ctx.read(handle))
    elif kind == "join":
        children = env["children"]
        for child in children if statement[1] else children[-1:]:
            handle = ctx.op("run.join", run_id=child[0])
            yield (handle,)
            _note(env, *ctx.read(handle))
        env["children"] = [] if statement[1] else children[:-1]
    elif kind == "lock":
        yield from _lock(ctx, env, statement)
    elif kind == "foreign":
        yield from _foreign(ctx, env, statement)
    elif kind == "checkpoint":
        handle = ctx.op("checkpoint", state={name: env[name] for name in ("acc", "pc", "children", "unwind")})
        yield (handle,)
        _note(env, *ctx.read(handle))  # answered only when it is refused
    elif kind == "unwind":
        env["unwind"].append(statement[1])
        ctx.on_unwind(_handler(statement[1], env))
    elif kind == "fail":
        raise ProgramError("as written")
    elif kind == "bad":
        handle = _bad(ctx, statement[1])
        yield (handle,)
        ok, payload = ctx.read(handle)
        assert not ok, payload
        _note(env, ok, payload)
    elif kind == "log":
        ctx.log(f"{env['acc']}")
    elif kind == "clock":
        env["acc"] = env["acc"] ^ ctx.clock_ns & 0xFFFFFFFF
    elif kind == "branch":
        for inner in statement[1 + env["acc"] % 2]:
            yield from _execute(ctx, env, inner)


def _lock(ctx: Ctx, env: Env, statement: Statement) -> Code:
    _, name, timeout, body, releases = statement
    handle = ctx.op("lock.acquire", name=name, timeout_s=timeout)
    yield (handle,)
    ok, payload = ctx.read(handle)
    _note(env, ok, payload)
    if not ok:
        return
    token = msgspec.json.decode(payload)["token"]
    env["token"] = [name, token]
    for inner in body:
        yield from _execute(ctx, env, inner)
    if releases:
        handle = ctx.op("lock.release", name=name, token=token)
        yield (handle,)
        _note(env, *ctx.read(handle))
        env.pop("token", None)


def _foreign(ctx: Ctx, env: Env, statement: Statement) -> Code:
    _, body, releases = statement
    handle = ctx.op("lock.foreign", name="elsewhere", owner=None)
    yield (handle,)
    ok, payload = ctx.read(handle)
    _note(env, ok, payload)
    if not ok:
        return
    owner = msgspec.json.decode(payload)["owner"]
    held = [owner]

    def undo(ctx: Ctx, reason: Any) -> Code:
        if held:
            yield from _give_up(ctx, env, owner)

    ctx.on_unwind(undo)
    handle = ctx.op("tool.call", tool="put", args={"take": owner})
    yield (handle,)
    _note(env, *ctx.read(handle))
    for inner in body:
        yield from _execute(ctx, env, inner)
    if releases:
        yield from _give_up(ctx, env, owner)
        held.clear()


def _give_up(ctx: Ctx, env: Env, owner: str) -> Code:
    handle = ctx.op("tool.call", tool="put", args={"undo": owner})
    yield (handle,)
    _note(env, *ctx.read(handle))
    handle = ctx.op("lock.foreign", name="elsewhere", owner=owner)
    yield (handle,)
    _note(env, *ctx.read(handle))


def _bad(ctx: Ctx, which: str) -> int:
    if which == "unknown":
        return ctx.op("tool.call", tool="nobody", args={})
    if which == "args":
        return ctx.op("tool.call", args={})
    if which == "sleep":
        return ctx.op("timer.sleep", seconds=-1)
    if which == "join":
        return ctx.op("run.join", run_id=ctx.run_id)
    if which == "release":
        return ctx.op("lock.release", name="never", token=1)
    if which == "model":
        return ctx.op("model.generate", profile="p", messages=[])
    if which == "send":
        return ctx.op("event.send", data=1)
    return ctx.raw("event.wait", b"{")


def _handler(what: tuple[str, ...], env: Env) -> Any:
    """An unwinding handler."""

    def handler(ctx: Ctx, reason: Any) -> Code:
        for which in what:
            if which == "emit":
                handle = ctx.op("emit", data={"unwinds": env["acc"]})
            elif which == "sleep":  # not possible while the run ends
                handle = ctx.op("timer.sleep", seconds=1)
            elif which == "release":
                if "token" not in env:
                    continue
                name, token = env["token"]
                handle = ctx.op("lock.release", name=name, token=token)
            else:
                handle = ctx.op("tool.call", tool=which, args={"undo": env["acc"]})
            yield (handle,)
            _note(env, *ctx.read(handle))

    return handler
