"""Interpreters that begin booted: an image of each that has one, made by a child once and kept beside the compiled
modules.

The child, ``python -m agentrt_sandbox.images``: booting and rewriting megabytes takes minutes of CPU at most, of which
the node is to see nothing. It is given a `_Job` on stdin and writes the image to stdout.
"""

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import msgspec

from agentrt.config import Config
from agentrt.errors import AgentrtError, EngineError, ModuleError
from agentrt.sizing import CoreParameters, core_parameters
from agentrt.spawn import child_environment, die_with_parent
from agentrt_sandbox.interpreters import load

_NICE: Final = 19
_TIMEOUT_S: Final = 1800.0
#: Guests and stacks of the child's core.
_GUESTS: Final = 8


class _Job(msgspec.Struct):
    parent_pid: int
    name: str
    digests: dict[str, str]
    parameters: dict[str, Any]
    folder: str
    bytes_max: int


def available() -> bool:
    """Whether images can be made here: ``pip install 'agentrt[capture]'``."""
    try:
        from agentrt.capture import image
        from agentrt.capture.binaryen import version

        version()
    except (ImportError, AgentrtError):
        return False
    return image is not None


class ImageMaker:
    """Makes images one at a time. `close` ends the one that is being made."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._child: subprocess.Popen[bytes] | None = None
        self._closed = False

    async def image_of(self, name: str, digests: dict[str, str]) -> bytes:
        """The image of an interpreter. Raises ModuleError, EngineError."""
        caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        folder = self._config.wasm.cache_path or caches / "agentrt"
        parameters = core_parameters(self._config)
        parameters["guests_max"] = parameters["stacks_max"] = _GUESTS
        parameters["workers"] = 1
        kept, bytes_max = str(Path(folder) / "images"), self._config.wasm.cache_bytes_max
        job = _Job(os.getpid(), name, digests, dict(parameters), kept, bytes_max)
        return await asyncio.to_thread(self._made, job)

    def close(self) -> None:
        """Any thread."""
        self._closed = True
        if self._child is not None:
            self._child.kill()

    def _made(self, job: _Job) -> bytes:
        child = self._child = subprocess.Popen(
            [sys.executable, "-P", "-m", "agentrt_sandbox.images"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=child_environment(),
        )
        try:
            if self._closed:
                child.kill()
            image, said = child.communicate(msgspec.json.encode(job), timeout=_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            child.kill()
            child.communicate()
            raise EngineError(f"the image of {job.name} was not made in {_TIMEOUT_S:.0f} s") from None
        finally:
            self._child = None
        if child.returncode:
            lines = said.decode(errors="replace").strip().splitlines()
            raise ModuleError(f"the image of {job.name} cannot be made: {lines[-1] if lines else child.returncode}")
        return image


def main() -> None:
    """In the child: the image goes to stdout."""
    job = msgspec.json.decode(sys.stdin.buffer.read(), type=_Job)
    os.nice(_NICE)
    die_with_parent(job.parent_pid)
    from agentrt.capture.image import make_image

    try:
        image = make_image(
            load(job.name, job.digests, preload=True),
            msgspec.convert(job.parameters, CoreParameters),
            clock=True,  # interpreters look at it, and forget it
            cache_folder=Path(job.folder),
            cache_bytes_max=job.bytes_max,
        )
    except AgentrtError as error:
        print(error, file=sys.stderr)
        sys.exit(1)
    sys.stdout.buffer.write(image.module)


if __name__ == "__main__":
    main()
