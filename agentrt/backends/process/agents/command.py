"""What an agent process is registered with, and the version that follows from it.

The version of a program is the digest of its command and of every file that belongs to it: the executable, the words of
the command that name files, and those named besides. What it loads by itself (libraries, modules) is not in it.
"""

import hashlib
import os
import shutil
from collections.abc import Mapping
from typing import Final, Literal

import msgspec

from agentrt.backends.process.agents.protocol import ABI
from agentrt.errors import InputError, ModuleError

#: Words of a command, and bytes of all of them: well under what the kernel takes.
_WORDS_MAX: Final = 256
_COMMAND_BYTES_MAX: Final = 64 * 1024
_FILES_MAX: Final = 1_000
#: Of the node's environment every process gets these.
_PASSED: Final = ("PATH", "LANG", "LC_ALL", "LC_CTYPE", "TZ")
#: For Python, whose sets would have another order in each process; of no meaning to others.
_SET: Final = {"PYTHONHASHSEED": "0"}
#: What the runtime sets itself.
SOCKET_VARIABLE: Final = "AGENTRT_SOCKET"

Preempt = Literal["freeze", "snapshot", "discard"]


class Command(msgspec.Struct, frozen=True):
    """An agent that is a program: ``Runtime.register(name, Command(("/opt/indexer", "--fast")))``.

    ``preempt``: what happens to its process when work of a higher tier needs the CPU: it is stopped and goes on later
    (``freeze``); it is told with SIGUSR1, and if it does not hand over a snapshot within 50 ms it is stopped
    (``snapshot``); it is ended, and its run is replayed later (``discard``). ``unwinds``: it has something to undo when
    its run is ended from outside. ``environment``: ``NAME=value``, or ``NAME`` for the node's own value. ``files``:
    more that the program is made of. ``read`` and ``write``: paths that it may use beside those and what every native
    process may. ``network``: whether it may use the node's network. ``memory_bytes_max``: 0: the configuration's.
    """

    command: tuple[str, ...]
    preempt: Preempt = "freeze"
    unwinds: bool = True
    environment: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    read: tuple[str, ...] = ()
    write: tuple[str, ...] = ()
    network: bool = False
    memory_bytes_max: int = 0

    def encode(self) -> bytes:
        """As `ProcessBackend.prepare` takes it."""
        return msgspec.json.encode(self)


class ProcessProgram(msgspec.Struct, frozen=True):
    """Implements agentrt.backends.base.Program. ``command``: with absolute paths; ``environment``: all of it but the
    socket; ``seen``: path, inode, mtime in ns and size of its files when the version was made."""

    version: str
    pins: dict[str, str]
    unwinds: bool
    command: tuple[str, ...]
    environment: dict[str, str]
    preempt: Preempt
    read: tuple[str, ...]
    write: tuple[str, ...]
    network: bool
    memory_bytes_max: int
    seen: tuple[tuple[str, int, int, int], ...]

    def changed(self) -> str | None:
        """A file that is not what it was when the version was made; None if there is none."""
        for path, *known in self.seen:
            try:
                if list(_stamp(path)) != known:
                    return path
            except OSError:
                return path
        return None


def decode_command(module: bytes) -> Command:
    """What `Command.encode` made. Raises InputError."""
    try:
        command = msgspec.json.decode(module, type=Command)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise InputError(f"this is no command of an agent process: {error}") from None
    words = command.command
    if not words or not words[0]:
        raise InputError("an agent process has a command", hint='Write command = ["/path/to/program", "argument"]')
    texts = (*words, *command.environment, *command.files, *command.read, *command.write)
    if len(words) > _WORDS_MAX or sum(len(os.fsencode(text)) for text in texts) > _COMMAND_BYTES_MAX:
        raise InputError(f"a command has at most {_WORDS_MAX} words, and all its texts {_COMMAND_BYTES_MAX} bytes")
    if any("\0" in text for text in texts):
        raise InputError("a command has no zero characters")
    for entry in command.environment:
        name = entry.partition("=")[0]
        if not name or name == SOCKET_VARIABLE:
            raise InputError(f"{entry.partition('=')[0]!r} cannot be set in the environment of a process")
    if max(map(len, (command.files, command.read, command.write))) > _FILES_MAX or command.memory_bytes_max < 0:
        raise InputError(f"a command names at most {_FILES_MAX} files, and no memory below 0")
    return command


def make_program(command: Command, environ: Mapping[str, str]) -> ProcessProgram:
    """Find the files, read them all, and say which version that is. Blocks. Raises ModuleError."""
    found = shutil.which(command.command[0], path=environ.get("PATH"))
    if found is None:
        raise ModuleError(
            f"there is no program {command.command[0]!r}", hint="Give its whole path, and make it executable"
        )
    words = [os.path.abspath(found), *(_absolute(word) for word in command.command[1:])]
    paths = [words[0], *(word for word in words[1:] if word.startswith("/") and os.path.isfile(word))]
    paths += [os.path.abspath(path) for path in command.files]
    digests: list[str] = []
    seen: list[tuple[str, int, int, int]] = []
    for path in dict.fromkeys(paths):
        try:
            stamp = _stamp(path)
            with open(path, "rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            if _stamp(path) != stamp:
                raise ModuleError(f"{path} changes while it is read", hint="Register the agent again")
        except OSError as error:
            raise ModuleError(f"{path} cannot be read: {error.strerror}") from None
        digests.append(f"{path}\0{digest}")
        seen.append((path, *stamp))
    environment = {name: environ[name] for name in _PASSED if name in environ} | _SET
    for entry in command.environment:
        name, equals, value = entry.partition("=")
        if equals:
            environment[name] = value
        elif name in environ:
            environment[name] = environ[name]
    whole = msgspec.json.encode([msgspec.structs.replace(command, command=tuple(words)), digests])
    return ProcessProgram(
        hashlib.sha256(whole).hexdigest(),
        {"process_abi": str(ABI)},
        command.unwinds,
        tuple(words),
        environment,
        command.preempt,
        command.read,
        command.write,
        command.network,
        command.memory_bytes_max,
        tuple(seen),
    )


def _absolute(word: str) -> str:
    """A relative path of a file is meant from where the agent is registered: its process starts elsewhere."""
    return os.path.abspath(word) if word and not word.startswith(("-", "/")) and os.path.isfile(word) else word


def _stamp(path: str) -> tuple[int, int, int]:
    found = os.stat(path)
    return found.st_ino, found.st_mtime_ns, found.st_size
