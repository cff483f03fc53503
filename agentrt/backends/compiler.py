"""Compiling modules in children: one at a time, bounded, never on the loop or a worker."""

import asyncio
import os
import signal
import sys
from collections.abc import Mapping
from typing import Final

import msgspec

from agentrt.backends.compile_child import OUT_OF_MEMORY, Failure, Parameters
from agentrt.errors import ClosedError, InternalError, ModuleError, ModuleLimitError
from agentrt.spawn import child_environment

_KINDS: Final = {kind.code: kind for kind in (ModuleError, ModuleLimitError)}
#: Native code is at most about this many times its module, and an error is short.
_ARTIFACT_FACTOR: Final = 64
_ARTIFACT_FLOOR: Final = 1 << 20


class Compiler:
    """Turns wasm into artifacts. Used on the control loop."""

    def __init__(self, engine_lib: str, limits: Mapping[str, object], *, timeout_ms: int, memory_bytes: int) -> None:
        """``timeout_ms``: CPU time of one module; its wall time is bounded by twice that."""
        self._parameters = Parameters(engine_lib, dict(limits), max(1, timeout_ms // 1000), memory_bytes, os.getpid())
        self._wall_s = timeout_ms * 2 / 1000
        self._one_at_a_time = asyncio.Semaphore(1)
        self._child: asyncio.subprocess.Process | None = None
        self._closed = False

    async def compile(self, wasm: bytes) -> bytes:
        """The artifact. Raises ModuleError, and ModuleLimitError when time or memory ran out."""
        async with self._one_at_a_time:
            if self._closed:
                raise ClosedError("the wasm backend is closed")
            child = self._child = await asyncio.create_subprocess_exec(
                sys.executable,
                "-P",
                "-m",
                "agentrt.backends.compile_child",
                msgspec.json.encode(self._parameters).decode(),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env=child_environment(),
                start_new_session=True,
            )
            try:
                answer, said = await asyncio.wait_for(child.communicate(wasm), self._wall_s)
            except TimeoutError:
                raise ModuleLimitError(
                    f"compiling took more than {self._wall_s:g} s", limit="wasm.compile_timeout_ms"
                ) from None
            finally:
                self._child = None
                if child.returncode is None:
                    child.kill()
                    await child.wait()
        if self._closed:
            raise ClosedError("the wasm backend is closed")
        return self._result(answer, said, child.returncode or 0, len(wasm))

    def _result(self, answer: bytes, said: bytes, status: int, wasm_len: int) -> bytes:
        if status == 0 and answer[:1] == b"+":
            if len(answer) > _ARTIFACT_FLOOR + _ARTIFACT_FACTOR * wasm_len:
                raise ModuleLimitError(f"{wasm_len} bytes of wasm became {len(answer)} bytes of native code")
            return answer[1:]
        if status == 0 and answer[:1] == b"-":
            failure = msgspec.json.decode(answer[1:], type=Failure)
            raise _KINDS.get(failure.code, ModuleError)(failure.message)
        if status == -signal.SIGXCPU:
            raise ModuleLimitError(
                f"compiling took more than {self._parameters.cpu_s} s of CPU time", limit="wasm.compile_timeout_ms"
            )
        if status in (OUT_OF_MEMORY, -signal.SIGABRT, -signal.SIGSEGV, -signal.SIGKILL):
            raise ModuleLimitError(
                f"compiling took more than {self._parameters.memory_bytes} bytes of memory, or crashed the compiler",
                limit="wasm.compile_memory_bytes_max",
            )
        last = said[-500:].decode(errors="replace").strip().rpartition("\n")[2]
        raise InternalError(f"the compile child ended with status {status} and no artifact: {last}")

    def close(self) -> None:
        """Ends a child at work; its module fails."""
        self._closed = True
        if self._child is not None and self._child.returncode is None:
            self._child.kill()
