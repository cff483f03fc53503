"""An agent as a program in Python: the process ABI's client. Python 3.10+, the standard library only, one file: copy it
anywhere.

    from agentrt.process_client import serve

    def agent(ctx, input):
        total = ctx.tool("add", x=input["x"], y=1)
        ctx.sleep(60)
        return {"total": total}

    serve(agent)

The program runs from its top whenever its run is brought back, and what it asks for is answered as before: so what it
asks for must depend on its input, its answers, `Context.now_ns` and `Context.random_bytes` only. docs/process-abi.md is
the manual.
"""

import json
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Final, NoReturn

ABI: Final = 1
_LINES_HELD_MAX: Final = 64


class StepFailed(Exception):
    """A step was answered with a failure: ``code``, ``details`` (the whole error)."""

    def __init__(self, details: dict[str, Any], handle: int = 0) -> None:
        super().__init__(f"{details.get('code')}: {details.get('message')}")
        self.code = str(details.get("code", ""))
        self.details = details
        self.handle = handle


class Unwind(BaseException):
    """The run was told to end: the program is over, its unwinding handlers run. Not to be caught."""


class Context:
    """What the program can ask for. Requests are those of docs/syscalls.md; every one of them is a step, but those that
    say otherwise."""

    def __init__(self, stream: socket.socket) -> None:
        self._stream = stream
        self._reader = stream.makefile("rb")
        self._out: list[bytes] = []
        self._handles = 0
        self._open: set[int] = set()
        self._handlers: list[Callable[[], Any]] = []
        self._noticed = False
        signal.signal(signal.SIGUSR1, self._notice)
        self._send(b'{"ready":%d}' % ABI)
        self._flush()
        start = self._read("start")
        if start["abi"] != ABI:
            raise RuntimeError(f"the node speaks process ABI {start['abi']}, this is {ABI}")
        self.run_id: str = start["run_id"]
        self.tenant: str = start["tenant"]
        self.request_bytes_max: int = start["request_bytes_max"]
        self.result_bytes_max: int = start["result_bytes_max"]
        self.input: Any = self._read("input")
        #: The state of the run's last checkpoint, None before the first.
        self.restored: Any = self._read("restored") if start["restored"] else None

    # --- any op ---------------------------------------------------------------------

    def submit(self, op: str, request: Any) -> int:
        """Ask without waiting; the handle of the step. It leaves at the next wait."""
        text = _json(request)
        if len(text) > self.request_bytes_max:
            raise ValueError(f"the request of {op} has {len(text)} bytes, more than {self.request_bytes_max}")
        self._handles += 1
        self._open.add(self._handles)
        self._send(b'{"ask":%d,"op":%b,"request":%b}' % (self._handles, _json(op), text))
        return self._handles

    def wait_any(self, handles: Iterable[int]) -> tuple[int, Any]:
        """Wait until one of the steps is answered: (its handle, its value). Raises StepFailed with ``handle`` set."""
        self._send(b'{"wait":%b}' % _json(list(handles)))
        self._flush()
        line = self._line()
        if "unwind" in line:
            raise Unwind(line["unwind"])
        handle: int = line["answer"]
        self._open.discard(handle)
        if not line["ok"]:
            raise StepFailed(line["value"], handle)
        return handle, line["value"]

    def wait(self, handle: int) -> Any:
        """The value of one step. Raises StepFailed."""
        return self.wait_any([handle])[1]

    def call(self, op: str, request: Any) -> Any:
        """Ask and wait. Raises StepFailed."""
        return self.wait(self.submit(op, request))

    def abandon(self, *handles: int) -> None:
        """These answers will never be waited for."""
        self._open.difference_update(handles)
        self._send(b'{"abandon":%b}' % _json(list(handles)))

    # --- the table -------------------------------------------------------------------

    def tool(self, name: str, **args: Any) -> Any:
        return self.call("tool.call", {"tool": name, "args": args})

    def model(self, profile: str, messages: Any, **more: Any) -> Any:
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        return self.call("model.generate", dict(more, profile=profile, messages=messages))

    def sleep(self, seconds: float) -> None:
        """A durable timer."""
        self.call("timer.sleep", {"seconds": seconds})

    def event(self, topic: str | None = None, key: str = "", timeout_s: float | None = None) -> Any:
        return self.call("event.wait", {"topic": topic, "key": key, "timeout_s": timeout_s})

    def send(
        self,
        data: Any = None,
        run_id: str | None = None,
        topic: str | None = None,
        key: str = "",
        id: str | None = None,
    ) -> str:
        """The event's id."""
        request = {"run_id": run_id, "topic": topic, "key": key, "data": data, "id": id}
        return str(self.call("event.send", request)["id"])

    def approval(self, question: str, data: Any = None, timeout_s: float | None = None) -> Any:
        return self.call("approval.request", {"question": question, "data": data, "timeout_s": timeout_s})

    def spawn(self, agent: str, input: Any = None, **more: Any) -> str:
        """Start a child run; its id, for `join`."""
        return str(self.call("run.spawn", dict(more, agent=agent, input=input))["run_id"])

    def join(self, run_id: str) -> Any:
        """The child's result. Raises StepFailed."""
        return self.call("run.join", {"run_id": run_id})

    @contextmanager
    def lock(self, name: str, timeout_s: float | None = None) -> Iterator[int]:
        """``with ctx.lock("name") as token:``"""
        token: int = self.call("lock.acquire", {"name": name, "timeout_s": timeout_s})["token"]
        try:
            yield token
        except Exception:
            self.call("lock.release", {"name": name, "token": token})
            raise
        else:
            self.call("lock.release", {"name": name, "token": token})

    def capacity(self) -> Any:
        return self.call("capacity.get", {})

    def emit(self, data: Any) -> None:
        """Tell observers, once. Not waited for."""
        self.abandon(self.submit("emit", {"data": data}))

    def checkpoint(self, state: Any) -> NoReturn:
        """The program ends here and is started again, with ``restored`` set to the state. Does not return."""
        self.call("checkpoint", {"state": state})
        raise RuntimeError("a checkpoint was answered")

    def log(self, message: str, level: str = "info") -> None:
        """A line for the operator, silent in replay. No step."""
        self._send(b'{"ask":0,"op":"log","request":%b}' % _json({"level": level, "message": message}))

    def now_ns(self) -> int:
        """The run's clock, Unix ns: the same when it is brought back. No step."""
        return int(self._ask(b'{"ask":0,"op":"clock.now"}'))

    def random_bytes(self, count: int) -> bytes:
        """From the run's own seed: the same when it is brought back. No step."""
        return bytes.fromhex(self._ask(b'{"ask":0,"op":"random.bytes","request":{"count":%d}}' % count))

    # --- ends and stops ---------------------------------------------------------------------

    def on_unwind(self, handler: Callable[[], Any]) -> Callable[[], Any]:
        """Call ``handler()`` if the run is ended from outside; last set, first called. Returns it."""
        self._handlers.append(handler)
        return handler

    @property
    def noticed(self) -> bool:
        """Whether more urgent work needs the CPU: a `snapshot` within 50 ms keeps this process from being stopped."""
        return self._noticed

    def snapshot(self, state: Any) -> None:
        """If noticed, hand over the state: the program ends here and is started again later, with ``restored`` set to
        it. Returns, and it goes on, if there was no notice or it cannot be put away now (steps are open, say). Call it
        in long computations; where it is called has no influence on what a replay must ask for."""
        if not self._noticed or self._open:
            return
        self._noticed = False
        self._send(b'{"snapshot":%b}' % _json(state))
        self._flush()
        self._read("refused")

    # --- lines ---------------------------------------------------------------------------------

    def _ask(self, line: bytes) -> Any:
        self._send(line)
        self._flush()
        return self._read("value")

    def _send(self, line: bytes) -> None:
        self._out.append(line)
        if len(self._out) >= _LINES_HELD_MAX:
            self._flush()

    def _flush(self) -> None:
        out, self._out = self._out, []
        if out:
            self._stream.sendall(b"\n".join(out) + b"\n")

    def _line(self) -> Any:
        line = self._reader.readline()
        if not line.endswith(b"\n"):
            os._exit(0)  # the node is gone, and starts another process for the run
        return json.loads(line)

    def _read(self, member: str) -> Any:
        return self._line()[member]

    def _end(self, line: bytes) -> None:
        self._send(line)
        self._flush()

    def _notice(self, number: int, frame: FrameType | None) -> None:
        self._noticed = True

    def _unwind(self) -> None:
        self._send(b'{"unwinding":true}')
        self._open.clear()
        while self._handlers:
            handler = self._handlers.pop()
            try:
                handler()
            except Exception as error:
                self.log(_text(f"an unwinding handler raised {type(error).__name__}: {error}"), "error")
        self._end(b'{"unwound":true}')


def serve(agent: Callable[["Context", Any], Any]) -> NoReturn:
    """Run ``agent(ctx, input)`` as this process's run, and end the process. What it returns is the run's result, what
    it raises its error."""
    stream = socket.socket(fileno=int(os.environ.pop("AGENTRT_SOCKET")))
    os.set_inheritable(stream.fileno(), False)
    ctx = Context(stream)
    try:
        try:
            result = _json(agent(ctx, ctx.input))
            if len(result) > ctx.result_bytes_max:
                raise ValueError(f"the result has {len(result)} bytes, more than {ctx.result_bytes_max}")
        except Unwind:
            ctx._unwind()
        except StepFailed as error:
            ctx._end(b'{"fail":%b}' % _json(dict(error.details, type="StepFailed")))
        except Exception as error:
            what = {"code": "agent_raised", "message": _text(f"{type(error).__name__}: {error}")}
            ctx._end(b'{"fail":%b}' % _json(what))
        else:
            ctx._end(b'{"return":%b}' % result)
    except (BrokenPipeError, ConnectionResetError):
        os._exit(0)
    sys.exit(0)


def _json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def _text(text: str) -> str:
    return text[:4000].encode(errors="replace").decode()
