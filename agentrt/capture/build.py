"""Making a module that can be captured: instrumented in a child, proven, kept by digest. Blocking."""

import hashlib
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Final, NamedTuple

import msgspec

from agentrt import _core
from agentrt.backends import wasi
from agentrt.backends.cache import ArtifactCache
from agentrt.capture.binaryen import version as binaryen_version
from agentrt.capture.child import STAGE, Failure, Parameters
from agentrt.capture.instrument import Preempt, is_instrumented, refuse
from agentrt.capture.proof import Proof, prove
from agentrt.errors import AgentrtError, EngineError, ModuleError
from agentrt.sizing import CoreParameters
from agentrt.spawn import child_environment

#: Changes when modules come out differently.
_RECIPE: Final = 1
_KINDS: Final = {kind.code: kind for kind in (ModuleError, EngineError)}
#: What Binaryen may have of address space: CPython takes 2 GiB of memory.
_MEMORY_BYTES: Final = 16 << 30
_SAID_BYTES_MAX: Final = 4096


class Built(NamedTuple):
    """A module that can be captured, with what was packed with it."""

    module: bytes
    proof: Proof
    cached: bool


def build(
    module: bytes,
    preempt: Preempt,
    parameters: CoreParameters,
    *,
    cache_folder: Path,
    cache_bytes_max: int,
    proof_input: bytes = b"null",
    progress: Callable[[str], None] = lambda _: None,
) -> Built:
    """The module made so that its guests can be captured, and proven to be so.

    ``parameters``: of the core that proves it. ``proof_input``: what the guest of the proof is given. ``progress`` is
    told what is begun, in a thread of its own at times. Raises ModuleError with the reason why it cannot be,
    EngineError without Binaryen."""
    code, packed = wasi.unpack(module)
    if is_instrumented(code):
        raise ModuleError("the module can be captured already", hint="Use it as it is")
    _, facts = _core.module_facts(code)
    refuse(facts)
    cache = ArtifactCache(cache_folder, _recipe(preempt), cache_bytes_max)
    digest = hashlib.sha256(code).hexdigest()
    made = cache.get(digest)
    cached = made is not None
    if made is None:
        made = in_child(code, preempt, progress)
    whole = made
    if packed is not None:
        whole = wasi.pack(made, args=packed.args, env=packed.env, files=packed.files, entry=packed.entry)
    progress("proving")
    proof = prove(module, whole, preempt, parameters, proof_input)
    if not cached:
        cache.put(digest, made)  # proven first
    return Built(whole, proof, cached)


def _recipe(preempt: Preempt) -> bytes:
    what = f"capture {_RECIPE} {preempt} {binaryen_version()}"
    return hashlib.blake2b(what.encode(), digest_size=16).digest()


def in_child(code: bytes, preempt: Preempt | None, progress: Callable[[str], None], stack: Sequence[int] = ()) -> bytes:
    """The module instrumented; ``preempt`` None: for an image, with the functions of its ``stack``. Raises ModuleError,
    EngineError."""
    parameters = msgspec.json.encode(Parameters(preempt, list(stack), _MEMORY_BYTES, os.getpid())).decode()
    child = subprocess.Popen(
        [sys.executable, "-P", "-m", "agentrt.capture.child", parameters],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=child_environment(),
        start_new_session=True,
    )
    said: list[bytes] = []
    assert child.stdin is not None and child.stdout is not None and child.stderr is not None
    writer = threading.Thread(target=_write, args=(child.stdin, code), daemon=True)
    listener = threading.Thread(target=_listen, args=(child.stderr, said, progress), daemon=True)
    try:
        writer.start()
        listener.start()
        answer = child.stdout.read()
        status = child.wait()
        listener.join()
    finally:
        if child.poll() is None:
            child.kill()
            child.wait()
    if status == 0 and answer[:1] == b"+":
        return answer[1:]
    if status == 0 and answer[:1] == b"-":
        failure = msgspec.json.decode(answer[1:], type=Failure)
        kind: type[AgentrtError] = _KINDS.get(failure.code, ModuleError)
        raise kind(failure.message, hint=failure.hint)
    last = b"".join(said)[-500:].decode(errors="replace").strip().rpartition("\n")[2]
    raise ModuleError(
        f"Binaryen cannot instrument the module: {last or f'it ended with status {status}'}",
        hint="Use it as it is: its runs are replayed instead, which any module can be",
    )


def _write(to: IO[bytes], code: bytes) -> None:
    try:
        with to:
            to.write(code)
    except BrokenPipeError:
        pass  # its status says why


def _listen(stderr: IO[bytes], said: list[bytes], progress: Callable[[str], None]) -> None:
    size = 0
    for line in stderr:
        if line.startswith(STAGE.encode()):
            progress(line[len(STAGE) :].decode().strip())
        elif size < _SAID_BYTES_MAX:
            said.append(line[:_SAID_BYTES_MAX])
            size += len(line)
