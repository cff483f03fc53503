"""The life of `agentrt serve`: signals, the service manager, and a bounded end.

The main thread only watches. The first SIGTERM or SIGINT stops the node, which ends within `Node.stop_bound_s`; a
second one ends the process at once. That is as safe: what was acknowledged is durable, and hosts die with the node.
"""

import contextlib
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Final

from agentrt.node.node import Node, Started
from agentrt.node.notify import Notifier

_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)
_LOOK_S: Final = 5.0


class StoppedHard(Exception):
    """A second signal came, or stopping took longer than it may: the process must end now."""

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.why = why


def serve(node: Node, started: Callable[[Started], None], notifier: Notifier | None = None) -> None:
    """Start the node, tell ``started``, and return once it was told to stop and has. On the main thread. Raises what
    `Node.start` raises, StoppedHard."""
    notifier = Notifier() if notifier is None else notifier
    try:
        with _signals() as received:
            before = {number: signal.signal(number, _stop_starting) for number in _SIGNALS}
            found = node.start()
            for number, handler in before.items():
                signal.signal(number, handler)
            started(found)
            notifier.send("READY=1", f"MAINPID={os.getpid()}")
            _watch(node, notifier, received)
            notifier.send("STOPPING=1")
            _stop(node, received)
    finally:
        notifier.close()


def _watch(node: Node, notifier: Notifier, received: Callable[[float], bool]) -> None:
    """Until a signal comes. The watchdog is fed only while the control loop lives."""
    look_s = _LOOK_S if notifier.watchdog_s is None else min(_LOOK_S, notifier.watchdog_s / 3)
    while not received(look_s):
        if notifier.watchdog_s is not None and node.alive:
            notifier.send("WATCHDOG=1")


def _stop(node: Node, received: Callable[[float], bool]) -> None:
    """Raises what `Node.stop` raises, StoppedHard."""
    raised: list[BaseException] = []
    over = threading.Event()

    def stop() -> None:
        try:
            node.stop()
        except BaseException as error:
            raised.append(error)
        over.set()

    thread = threading.Thread(target=stop, name="agentrt-stop", daemon=True)
    thread.start()
    end_s = time.monotonic() + node.stop_bound_s
    while not over.wait(0.02):
        if received(0.0):
            raise StoppedHard("a second signal came")
        if time.monotonic() > end_s:
            raise StoppedHard(f"stopping took more than {node.stop_bound_s:g} s")
    if raised:
        raise raised[0]


def _stop_starting(number: int, frame: object) -> None:
    raise StoppedHard("it was still starting")


@contextlib.contextmanager
def _signals() -> Iterator[Callable[[float], bool]]:
    """``received(timeout_s)``: whether a signal to stop came, since it last said so."""
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    reader.setblocking(False)
    before = {number: signal.signal(number, lambda *_: None) for number in _SIGNALS}
    # Woken up by a byte, not by the handler: any thread may be the one that the kernel interrupts.
    wakeup = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)

    def received(timeout_s: float) -> bool:
        end_s = time.monotonic() + timeout_s
        while select.select([reader], [], [], max(0.0, end_s - time.monotonic()))[0]:
            if any(number in _SIGNALS for number in reader.recv(64)):
                return True
        return False

    try:
        yield received
    finally:
        signal.set_wakeup_fd(wakeup)
        for number, handler in before.items():
            signal.signal(number, handler)
        reader.close()
        writer.close()
