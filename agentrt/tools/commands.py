"""`command_tool`: a native program as a tool, declared in Python or by ``[tools.commands.NAME]``."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, Literal

from agentrt.backends.process.settings import CommandConfig
from agentrt.errors import ConfigError, InputError
from agentrt.tools.declare import (
    ATTEMPTS_MAX,
    KEY_TTL_DEFAULT_S,
    KEY_TTL_MAX_S,
    TIMEOUT_DEFAULT_S,
    TIMEOUT_MAX_S,
    check_class,
    check_name,
    check_secrets,
)
from agentrt.tools.spec import Command, ToolSpec

CLASS_COMMANDS: Final = "code"
#: Kinds that a command may have. It cannot be asked what became of a call.
KINDS: Final = ("pure", "keyed", "at_most_once")
INPUTS: Final = ("json", "text")
OUTPUTS: Final = ("json", "text")

_ARGUMENTS_MAX, _ARGUMENT_CHARS_MAX = 256, 32_768
_VARIABLE: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")
#: What the runtime sets itself, and what would change how the program is started.
_RESERVED: Final = ("AGENTRT_", "LD_")


def command_tool(
    name: str,
    command: Sequence[str],
    *,
    kind: Literal["pure", "keyed", "at_most_once"],
    timeout: float = TIMEOUT_DEFAULT_S,
    cls: str = CLASS_COMMANDS,
    input: Literal["json", "text"] = "json",
    output: Literal["json", "text"] = "json",
    environment: Mapping[str, str] | None = None,
    network: bool = False,
    read: Sequence[str] = (),
    write: Sequence[str] = (),
    memory_bytes_max: int = 0,
    processes_max: int = 0,
    preempt: Literal["freeze", "snapshot", "discard"] = "freeze",
    key_ttl: float | None = None,
    attempts_max: int | None = None,
    secrets: Sequence[str] = (),
) -> ToolSpec:
    """A tool that executes a program, confined, in a process of its own per call. Give what is returned to a runtime as
    one of its ``tools``.

    ``command``: the program, an absolute path or a name in /usr/local/bin, /usr/bin or /bin, and its arguments; there
    is no shell unless it is one. The call's arguments come on its standard input, ``input`` says how: ``json``, the
    object as it is; ``text``, the string that is its member ``text``. Its standard output is the result: ``json``, or
    ``text``, the text as it is. Exit status 0 is success; else the call fails with ``tool_failed``, the status and the
    end of its standard error. The idempotency key and the attempt are in AGENTRT_IDEMPOTENCY_KEY and AGENTRT_ATTEMPT.

    It has no network unless ``network``, may read what every program needs and ``read``, and change its working folder,
    which is empty and goes with it, and ``write``. ``timeout`` in seconds does not count while it is frozen.
    ``preempt``: what becomes of it when urgent work needs the machine. ``freeze``: it goes on afterwards. ``discard``:
    it is killed and begins again. ``snapshot``: it gets SIGUSR1 if it handles that, and goes on afterwards, unless it
    exits with status 75 within 50 ms; what it has written to its standard output is then its state, which the next
    process of this call reads from the descriptor that AGENTRT_STATE_FD names. ``kind``, ``cls``, ``key_ttl``,
    ``attempts_max``, ``secrets``: as for `tool`. Raises InputError.
    """
    check_name(name)
    check_class(cls)
    if kind not in KINDS:
        raise InputError(f"{kind!r} is no kind of command", hint="Use " + ", ".join(KINDS))
    for what, value, allowed in (
        ("input", input, INPUTS),
        ("output", output, OUTPUTS),
        ("preempt", preempt, ("freeze", "snapshot", "discard")),
    ):
        if value not in allowed:
            raise InputError(f"command {name}: {what} is {value!r}", hint="Use " + ", ".join(allowed))
    if preempt == "discard" and kind == "at_most_once":
        raise InputError(f"command {name}: one that may not be repeated cannot be discarded", hint='preempt="freeze"')
    if not 0 < timeout <= TIMEOUT_MAX_S:
        raise InputError(f"command {name}: timeout is more than 0 and at most {TIMEOUT_MAX_S:g} s, not {timeout!r}")
    if key_ttl is not None and (kind != "keyed" or not 0 < key_ttl <= KEY_TTL_MAX_S):
        raise InputError(f"command {name}: key_ttl is for keyed ones, up to {KEY_TTL_MAX_S:g} s")
    if attempts_max is not None and not (isinstance(attempts_max, int) and 1 <= attempts_max <= ATTEMPTS_MAX):
        raise InputError(f"command {name}: attempts_max is 1 to {ATTEMPTS_MAX}, not {attempts_max!r}")
    for what, bound in (("memory_bytes_max", memory_bytes_max), ("processes_max", processes_max)):
        if not isinstance(bound, int) or not 0 <= bound < 2**50:
            raise InputError(f"command {name}: {what} is a number, 0 for the configuration's, not {bound!r}")
    argv = _check_argv(name, command)
    made = Command(
        argv,
        input,
        output,
        _check_environment(name, environment or {}),
        network,
        _check_paths(name, read),
        _check_paths(name, write),
        memory_bytes_max,
        processes_max,
        preempt,
    )
    return ToolSpec(
        name,
        kind,
        round(timeout * 1e9),
        False,
        f"command:{argv[0]}",
        cls,
        round((KEY_TTL_DEFAULT_S if key_ttl is None else key_ttl) * 1e9),
        attempts_max=attempts_max,
        secrets=check_secrets(tuple(secrets)),
        command=made,
    )


def _check_argv(name: str, command: Sequence[str]) -> tuple[str, ...]:
    if isinstance(command, str) or not command:
        raise InputError(f"command {name}: a program and its arguments, as a list", hint='["wc", "-w"]')
    for part in command:
        if not isinstance(part, str) or "\0" in part or len(part) > _ARGUMENT_CHARS_MAX:
            raise InputError(f"command {name}: {part!r:.80} is no argument of a program")
    if len(command) > _ARGUMENTS_MAX or not command[0] or ("/" in command[0] and not command[0].startswith("/")):
        raise InputError(
            f"command {name}: {command[0]!r:.200} with {len(command) - 1} arguments",
            hint=f"An absolute path or a plain name, and at most {_ARGUMENTS_MAX} parts",
        )
    return tuple(command)


def _check_environment(name: str, environment: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    for variable, value in environment.items():
        if not _VARIABLE.fullmatch(variable) or variable.startswith(_RESERVED):
            raise InputError(f"command {name}: {variable!r:.200} is no variable for it")
        if not isinstance(value, str) or "\0" in value or len(value) > _ARGUMENT_CHARS_MAX:
            raise InputError(f"command {name}: the value of {variable} will not do")
    return tuple(sorted(environment.items()))


def _check_paths(name: str, paths: Sequence[str]) -> tuple[str, ...]:
    for path in paths:
        if not isinstance(path, str) or not path.startswith("/") or "\0" in path:
            raise InputError(f"command {name}: {path!r:.200} is no absolute path")
    return tuple(paths)


def command_specs(tables: Mapping[str, Mapping[str, Any]]) -> Iterator[ToolSpec]:
    """The tools that the tables name. Raises ConfigError naming the table."""
    for name, table in tables.items():
        told = CommandConfig(**table)
        try:
            yield command_tool(
                name,
                told.command,
                kind=told.kind,
                timeout=told.timeout_ms / 1e3,
                cls=told.cls,
                input=told.input,
                output=told.output,
                environment=dict(_variable(each) for each in told.environment),
                network=told.network,
                read=told.read,
                write=told.write,
                memory_bytes_max=told.memory_bytes_max,
                processes_max=told.processes_max,
                preempt=told.preempt,
                secrets=told.secrets,
            )
        except InputError as error:
            raise ConfigError(f"tools.commands.{name}: {error.message}", hint=error.hint) from error


def _variable(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise InputError(f"{text!r:.80} is no NAME=value")
    return name, value
