"""Agents as programs, for the tests: ``python process_agents.py NAME``."""

import hashlib
import os
import signal
import subprocess
import sys
import time

from agentrt.process_client import StepFailed, serve


def double(ctx, input):
    return ctx.tool("double", x=input)


def parallel(ctx, input):
    """Steps in flight together: which is answered first is part of the history."""
    handles = {ctx.submit("tool.call", {"tool": "double", "args": {"x": x}}): x for x in range(input)}
    out = []
    while handles:
        handle, value = ctx.wait_any(handles)
        out.append([handles.pop(handle), value])
    return out


def computed(ctx, input):
    """Clock and randomness, which a replay repeats."""
    out = [ctx.now_ns(), ctx.random_bytes(40).hex()]
    ctx.tool("double", x=1)
    return [*out, ctx.now_ns(), ctx.now_ns(), ctx.random_bytes(8).hex()]


def fails(ctx, input):
    try:
        ctx.tool("double", x="refused")
    except StepFailed as error:
        if input == "catch":
            return error.code
        raise


def raises(ctx, input):
    raise KeyError("not there")


def exits(ctx, input):
    print("last words", flush=True)
    os._exit(input)


def dies(ctx, input):
    os.kill(os.getpid(), input)
    time.sleep(60)


def says(ctx, input):
    """Whatever is given, in place of the protocol."""
    ctx._stream.sendall(input.encode() + b"\n")
    time.sleep(60)


def hog(ctx, input):
    """Computes, with a step before and after."""
    ctx.tool("double", x=0)
    end = time.process_time() + input
    digest = b""
    while time.process_time() < end:
        digest = hashlib.sha256(digest).digest()
    return ctx.tool("double", x=1)


def endless(ctx, input):
    ctx.on_unwind(lambda: ctx.tool("undo", what=input))
    ctx.tool("double", x=0)
    while True:
        pass


def counts(ctx, input):
    """A computation that can be put away in the middle."""
    at, cpu = ctx.restored or (0, 0)
    begun = time.process_time()
    while at < input:
        at += 1
        sum(range(20_000))
        ctx.snapshot([at, cpu + time.process_time() - begun])
    return [ctx.tool("double", x=at), ctx.restored is not None]


def segments(ctx, input):
    state = ctx.restored or 0
    if state < input:
        ctx.tool("double", x=state)
        ctx.checkpoint(state + 1)
    return [state, ctx.random_bytes(4).hex()]


def unwinds(ctx, input):
    """Waits for an event that does not come, and has something to undo."""
    for what in input:
        ctx.on_unwind(lambda what=what: ctx.tool("undo", what=what))
    ctx.tool("double", x=1)
    ctx.event(key="never")


def children(ctx, input):
    """A grandchild that is no child of the node's and computes."""
    child = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    ctx.tool("child", pid=child.pid)
    if input == "stays":
        ctx.event(key="never")
    return child.pid


def looks(ctx, input):
    """What it was given of the node."""
    fds = sorted(int(fd) for fd in os.listdir("/proc/self/fd"))
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    ignored = [n for n in signal.valid_signals() if signal.getsignal(n) is signal.SIG_IGN]
    return {
        "fds": fds[:-1],
        "environment": sorted(os.environ),
        "blocked": [int(n) for n in blocked],
        "ignored": [int(n) for n in ignored],
        "leader": os.getsid(0) == os.getpid(),
        "nice": os.nice(0),
        "folder": os.getcwd(),
        "home": os.environ["HOME"],
    }


def sleeps(ctx, input):
    """Uses its slot for nothing."""
    ctx.tool("double", x=1)
    time.sleep(input)
    return ctx.tool("double", x=2)


def writes(ctx, input):
    """Floods its output, and ends without a word."""
    block = b"x" * 65536
    for _ in range(input):
        os.write(1, block)
    os.write(1, b"the end")
    os._exit(3)


def greedy(ctx, input):
    """Takes memory up to a bound that is above its own, but harms nobody."""
    held = [bytearray(1 << 20) for _ in range(input)]
    return len(held)


if __name__ == "__main__":
    serve(globals()[sys.argv[1]])
