"""The `tool` decorator: what a tool's author says about it, checked where it is said."""

import inspect
import re
from collections.abc import Callable
from typing import Any, Final, Literal, TypeVar

import msgspec

from agentrt.errors import InputError

KINDS: Final = ("pure", "keyed", "reconcilable", "at_most_once")

#: Classes a tool may have unless the registry was made with others.
CLASSES_DEFAULT: Final = ("tool", "code", "model")
CLASS_DEFAULT: Final = "tool"

#: Keyword-only parameters that the runtime fills in; a guest cannot set them.
RUNTIME_PARAMETERS: Final = ("idempotency_key", "attempt")

TIMEOUT_DEFAULT_S: Final = 30.0
TIMEOUT_MAX_S: Final = 24 * 3600.0
KEY_TTL_DEFAULT_S: Final = 24 * 3600.0
KEY_TTL_MAX_S: Final = 10 * 366 * 24 * 3600.0
ATTEMPTS_MAX: Final = 1_000
BATCH_DEFAULT: Final = 32
BATCH_MAX: Final = 10_000
BATCH_WAIT_MAX_MS: Final = 60_000.0

_ATTRIBUTE: Final = "__agentrt_tool__"
_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_.\-]{0,127}")
_CLASS: Final = re.compile(r"[a-z][a-z0-9_\-]{0,63}")
#: No leading underscore and no two in a row: ``tenant__name`` can then be taken apart in one way only.
_SECRET: Final = re.compile(r"[A-Za-z0-9](?:_?[A-Za-z0-9.\-]){0,63}")

Function = TypeVar("Function", bound=Callable[..., Any])


class Declaration(msgspec.Struct, frozen=True, kw_only=True):
    """What the decorator attaches; `spec_of` adds where the function is found."""

    name: str
    kind: str
    timeout_ns: int
    cls: str
    key_ttl_ns: int
    attempts_max: int | None
    reconcile: Callable[..., Any] | None
    batch: Callable[..., Any] | None
    max_batch: int
    max_wait_ns: int
    secrets: tuple[str, ...]


class BatchItem(msgspec.Struct, frozen=True):
    """One call of a batch. ``args`` are checked against the tool's type hints; the key is None for pure tools."""

    args: dict[str, Any]
    idempotency_key: str | None
    attempt: int


def tool(
    *,
    kind: Literal["pure", "keyed", "reconcilable", "at_most_once"],
    timeout: float = TIMEOUT_DEFAULT_S,
    name: str | None = None,
    cls: str = CLASS_DEFAULT,
    reconcile: Callable[..., Any] | None = None,
    key_ttl: float | None = None,
    attempts_max: int | None = None,
    batch: Callable[[list[BatchItem]], Any] | None = None,
    max_batch: int | None = None,
    max_wait_ms: float = 0.0,
    secrets: tuple[str, ...] | list[str] = (),
) -> Callable[[Function], Function]:
    """Declare a function, sync or async, as a tool. The function itself is returned unchanged.

    ``kind`` says what is safe when nobody saw how a call ended:

    - ``pure``: it has no effect and may be called again.
    - ``keyed``: the callee deduplicates by the ``idempotency_key`` for ``key_ttl`` seconds (default a day), within
      which it may be called again.
    - ``reconcilable``: ``reconcile`` finds out what became of the call; nothing is repeated before it said "not found".
    - ``at_most_once``: nothing is repeated; an operator decides.

    A tool gets ``idempotency_key`` (str, all kinds but pure) and ``attempt`` (int, from 1) if it has keyword-only
    parameters of these names. ``reconcile`` (also for keyed tools, for when the key is too old) is a function with some
    of the tool's parameters that returns `Found`, `NOT_FOUND` or `UNKNOWN`. ``timeout`` is in seconds, of one
    execution. ``cls`` names the pool of hosts. ``attempts_max`` replaces the runtime's bound on executions of one step.

    ``batch`` takes calls that wait at the same time: a list of at most ``max_batch`` (default 32) `BatchItem`, and
    returns a list of as many results, in order; an item that is an exception is that call's failure. A first call
    waits at most ``max_wait_ms`` for company. A lone call goes to the function itself.

    ``secrets`` names those that ``secret://name`` arguments may stand for. Functions given here are async if the tool
    is. Arguments are checked against the type hints; the result must be something that msgspec can turn into JSON.
    Raises InputError.
    """
    if kind not in KINDS:
        raise InputError(f"{kind!r} is no kind of tool", hint="Use " + ", ".join(KINDS))
    if not 0 < timeout <= TIMEOUT_MAX_S:
        raise InputError(f"a tool's timeout is more than 0 and at most {TIMEOUT_MAX_S:g} seconds, not {timeout!r}")
    check_class(cls)
    _check_repetition(kind, reconcile, key_ttl, attempts_max)
    _check_batch(batch, max_batch, max_wait_ms, timeout)
    named = check_secrets(secrets)

    def declare(function: Function) -> Function:
        if not callable(function) or not hasattr(function, "__qualname__"):
            raise InputError(f"{function!r} is no function")
        title = name if name is not None else function.__name__
        check_name(title)
        _check_parameters(title, kind, function)
        _check_companions(title, function, reconcile, batch)
        declaration = Declaration(
            name=title,
            kind=kind,
            timeout_ns=round(timeout * 1e9),
            cls=cls,
            key_ttl_ns=round((KEY_TTL_DEFAULT_S if key_ttl is None else key_ttl) * 1e9),
            attempts_max=attempts_max,
            reconcile=reconcile,
            batch=batch,
            max_batch=1 if batch is None else BATCH_DEFAULT if max_batch is None else max_batch,
            max_wait_ns=round(max_wait_ms * 1e6),
            secrets=named,
        )
        setattr(function, _ATTRIBUTE, declaration)
        return function

    return declare


def declaration_of(function: object) -> Declaration | None:
    """What `tool` attached to the function, or None."""
    found = getattr(function, _ATTRIBUTE, None)
    return found if isinstance(found, Declaration) else None


def is_async(function: Callable[..., Any]) -> bool:
    """Whether calling the function gives a coroutine, decorators that use functools.wraps included."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(inspect.unwrap(function))


def _check_repetition(
    kind: str, reconcile: Callable[..., Any] | None, key_ttl: float | None, attempts_max: int | None
) -> None:
    if kind == "reconcilable" and reconcile is None:
        raise InputError("a reconcilable tool needs reconcile=, the function that finds out what became of a call")
    if reconcile is not None and kind not in ("keyed", "reconcilable"):
        raise InputError(f"a tool of kind {kind} is not reconciled", hint="Declare it reconcilable, or keyed")
    if key_ttl is not None and kind != "keyed":
        raise InputError(f"key_ttl is for keyed tools, not for {kind}")
    if key_ttl is not None and not 0 < key_ttl <= KEY_TTL_MAX_S:
        raise InputError(f"key_ttl is more than 0 and at most {KEY_TTL_MAX_S:g} seconds, not {key_ttl!r}")
    if attempts_max is not None and not (isinstance(attempts_max, int) and 1 <= attempts_max <= ATTEMPTS_MAX):
        raise InputError(f"attempts_max is 1 to {ATTEMPTS_MAX}, not {attempts_max!r}")


def _check_batch(batch: Callable[..., Any] | None, max_batch: int | None, max_wait_ms: float, timeout: float) -> None:
    if batch is None:
        if max_batch is not None or max_wait_ms:
            raise InputError("max_batch and max_wait_ms need batch=, the function that takes several calls at once")
        return
    if max_batch is not None and not (isinstance(max_batch, int) and 2 <= max_batch <= BATCH_MAX):
        raise InputError(f"max_batch is 2 to {BATCH_MAX}, not {max_batch!r}")
    if not 0 <= max_wait_ms <= min(BATCH_WAIT_MAX_MS, timeout * 1e3):
        raise InputError(f"max_wait_ms is 0 to {BATCH_WAIT_MAX_MS:g} and at most the timeout, not {max_wait_ms!r}")


def check_name(name: object) -> None:
    """Raises InputError if it is no name of a tool."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InputError(f"{name!r} is no tool name", hint="Letters, digits, _ . -, a letter first")


def check_class(cls: object) -> None:
    """Raises InputError if it is no name of a class."""
    if not isinstance(cls, str) or not _CLASS.fullmatch(cls):
        raise InputError(f"{cls!r} is no class of tools", hint="By default: " + ", ".join(CLASSES_DEFAULT))


def check_secrets(secrets: tuple[str, ...] | list[str]) -> tuple[str, ...]:
    """The names, each once. Raises InputError."""
    if not isinstance(secrets, (tuple, list)):
        raise InputError(f"secrets is a list of names, not {type(secrets).__name__}")
    for secret in secrets:
        if not is_secret_name(secret):
            raise InputError(
                f"{secret!r} is no name of a secret", hint="Letters, digits, . - and single _, a letter or digit first"
            )
    return tuple(dict.fromkeys(secrets))


def is_secret_name(name: object) -> bool:
    return isinstance(name, str) and _SECRET.fullmatch(name) is not None


def _check_parameters(title: str, kind: str, function: Callable[..., Any]) -> None:
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise InputError(f"tool {title}: a generator cannot be a tool")
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise InputError(
                f"tool {title}: parameter {parameter} cannot be given by name", hint="Arguments come as a JSON object"
            )
        if parameter.kind is parameter.KEYWORD_ONLY and parameter.name == "idempotency_key" and kind == "pure":
            raise InputError(f"tool {title}: a pure tool gets no idempotency_key", hint="Declare it keyed")


def _check_companions(
    title: str,
    function: Callable[..., Any],
    reconcile: Callable[..., Any] | None,
    batch: Callable[..., Any] | None,
) -> None:
    for role, companion in (("reconcile", reconcile), ("batch", batch)):
        if companion is None:
            continue
        if not callable(companion):
            raise InputError(f"tool {title}: {role}={companion!r} is no function")
        if is_async(companion) is not is_async(function):
            raise InputError(f"tool {title}: its {role} function must be async if the tool is, and only then")
    if reconcile is None:
        return
    known = {*inspect.signature(function).parameters, *RUNTIME_PARAMETERS}
    for parameter in inspect.signature(reconcile).parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.POSITIONAL_ONLY):
            raise InputError(f"tool {title}: parameter {parameter} of its reconcile function cannot be given by name")
        if parameter.kind is parameter.VAR_KEYWORD:
            continue
        if parameter.name not in known and parameter.default is parameter.empty:
            raise InputError(f"tool {title}: its reconcile function asks for {parameter.name}, which the tool has not")
