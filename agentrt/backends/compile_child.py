"""The compile child: ``python -m agentrt.backends.compile_child PARAMETERS``, wasm on standard input.

A hostile module can take all the time and memory that compiling is given, so it is given little: this process, at the
lowest priority, with limits on memory and CPU time. Answers on standard output: b"+" and the artifact, or b"-" and an
error as JSON. A limit that strikes ends the process without an answer.
"""

import os
import resource
import signal
import sys
from typing import Any, Final

import msgspec

from agentrt import _core
from agentrt.errors import AgentrtError
from agentrt.spawn import die_with_parent


class Parameters(msgspec.Struct):
    """``limits``: keyword arguments of `compile_module`."""

    engine_lib: str
    limits: dict[str, Any]
    cpu_s: int
    memory_bytes: int
    node_pid: int


class Failure(msgspec.Struct):
    code: str
    message: str


#: Exit status after running out of memory, where Python still can say so.
OUT_OF_MEMORY: Final = 3


def main() -> int:
    parameters = msgspec.json.decode(sys.argv[1], type=Parameters)
    os.nice(19)
    die_with_parent(parameters.node_pid)
    resource.setrlimit(resource.RLIMIT_AS, (parameters.memory_bytes, parameters.memory_bytes))
    # The hard limit kills at once; a second earlier the soft one does, with a signal of its own to be told by.
    resource.setrlimit(resource.RLIMIT_CPU, (parameters.cpu_s, parameters.cpu_s + 1))
    signal.signal(signal.SIGXCPU, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        artifact = _core.compile_module(parameters.engine_lib, sys.stdin.buffer.read(), **parameters.limits)
    except AgentrtError as error:
        answer = b"-" + msgspec.json.encode(Failure(error.code, error.message))
    except MemoryError:
        return OUT_OF_MEMORY
    else:
        answer = b"+" + artifact
    sys.stdout.buffer.write(answer)
    return 0


if __name__ == "__main__":
    sys.exit(main())
