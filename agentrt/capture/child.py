"""The child that instruments: ``python -P -m agentrt.capture.child PARAMETERS``, wasm on standard input.

Binaryen ends the process of a module that it does not like, and may take much memory; so it has this process, at the
lowest priority. On standard error a line for each stage; on standard output b"+" and the module, or b"-" and an error
as JSON.
"""

import os
import resource
import sys
from typing import Final

import msgspec

from agentrt.capture.instrument import Preempt, instrument, instrument_for_image
from agentrt.errors import AgentrtError
from agentrt.spawn import die_with_parent


class Parameters(msgspec.Struct):
    preempt: Preempt | None  # None: for an image, and then
    stack: list[int]
    memory_bytes: int
    parent_pid: int


class Failure(msgspec.Struct):
    code: str
    message: str
    hint: str | None = None


#: Begins the lines on standard error that name a stage: the library says things there, too.
STAGE: Final = "stage: "


def main() -> int:
    parameters = msgspec.json.decode(sys.argv[1], type=Parameters)
    os.nice(19)
    die_with_parent(parameters.parent_pid)
    resource.setrlimit(resource.RLIMIT_AS, (parameters.memory_bytes, parameters.memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

    def say(stage: str) -> None:
        print(STAGE + stage, file=sys.stderr, flush=True)

    try:
        code = sys.stdin.buffer.read()
        made = (
            instrument_for_image(code, parameters.stack, say)
            if parameters.preempt is None
            else instrument(code, parameters.preempt, say)
        )
        answer = b"+" + made
    except AgentrtError as error:
        answer = b"-" + msgspec.json.encode(Failure(error.code, error.message, error.hint))
    sys.stdout.buffer.write(answer)
    sys.stdout.flush()
    os._exit(0)  # the library's threads need not be waited for


if __name__ == "__main__":
    main()
