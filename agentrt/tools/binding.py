"""From a tool's signature to a checked call, in the host: JSON in, keyword arguments out, JSON back."""

import inspect
import typing
from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec

from agentrt.jsontext import UnfitError, encode_exact
from agentrt.tools.declare import RUNTIME_PARAMETERS, declaration_of, is_async
from agentrt.tools.secretrefs import substitute

MESSAGE_CHARS_MAX: Final = 2048

_encoder: Final = msgspec.json.Encoder()


class Binding:
    """One tool, ready to be called. ``batch`` and ``reconcile`` are its companions, or None."""

    __slots__ = (
        "_decoder", "_reconcile_takes", "_wants_attempt", "_wants_key", "batch", "function", "is_async", "kind",
        "reconcile",
    )  # fmt: skip

    def __init__(self, function: Callable[..., Any]) -> None:
        """Raises TypeError or NameError if a type hint cannot be resolved or is nothing JSON can carry."""
        self.function = function
        self.is_async = is_async(function)
        declaration = declaration_of(function)
        self.kind = "pure" if declaration is None else declaration.kind
        self.batch = None if declaration is None else declaration.batch
        self.reconcile = None if declaration is None else declaration.reconcile
        hints = typing.get_type_hints(function, include_extras=True)
        fields: list[Any] = []
        given: set[str] = set()
        for parameter in inspect.signature(function).parameters.values():
            if parameter.kind is parameter.KEYWORD_ONLY and parameter.name in RUNTIME_PARAMETERS:
                given.add(parameter.name)
                continue
            hint = hints.get(parameter.name, Any)
            if parameter.default is parameter.empty:
                fields.append((parameter.name, hint))
            else:
                fields.append((parameter.name, hint, msgspec.field(default_factory=_constant(parameter.default))))
        arguments = msgspec.defstruct("Arguments", fields, kw_only=True, forbid_unknown_fields=True)
        self._decoder = msgspec.json.Decoder(arguments)
        self._wants_key = "idempotency_key" in given
        self._wants_attempt = "attempt" in given
        self._reconcile_takes = None if self.reconcile is None else _taken_by(self.reconcile)

    def given(self, args: bytes, secrets: Mapping[str, str] | None = None) -> dict[str, Any]:
        """The guest's part of the arguments. Raises msgspec.MsgspecError if the JSON is none or does not fit the hints,
        UnicodeDecodeError, RecursionError."""
        return msgspec.structs.asdict(self._decoder.decode(substitute(args, secrets) if secrets else args))

    def arguments(
        self, args: bytes, key: str | None, attempt: int, secrets: Mapping[str, str] | None = None
    ) -> dict[str, Any]:
        """Keyword arguments of the call. Raises as `given`."""
        keywords = self.given(args, secrets)
        if self._wants_key:
            keywords["idempotency_key"] = key
        if self._wants_attempt:
            keywords["attempt"] = attempt
        return keywords

    def reconcile_arguments(
        self, args: bytes, key: str | None, attempt: int, secrets: Mapping[str, str] | None = None
    ) -> dict[str, Any]:
        """Keyword arguments of its reconcile function. Raises as `given`."""
        keywords = self.given(args, secrets) | {"idempotency_key": key, "attempt": attempt}
        if self._reconcile_takes is None:
            return keywords
        return {name: value for name, value in keywords.items() if name in self._reconcile_takes}


def _constant(value: Any) -> Callable[[], Any]:
    return lambda: value


def _taken_by(function: Callable[..., Any]) -> frozenset[str] | None:
    """The names of its parameters; None if it takes any."""
    parameters = inspect.signature(function).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    return frozenset(parameter.name for parameter in parameters)


def encode_result(result: Any, bytes_max: int) -> tuple[bytes, str | None]:
    """(payload, code) of what a tool returned; code None means it went well."""
    try:
        payload = encode_exact(result)
    except UnfitError as error:
        return failure("tool_result", f"the result {error}")
    if len(payload) > bytes_max:
        return failure("tool_result_too_big", f"the result has {len(payload)} bytes, more than {bytes_max}")
    return payload, None


def failure(code: str, message: str) -> tuple[bytes, str]:
    """(payload, code) of a failed call; the payload is what the guest reads."""
    return error_payload(code, message), code


def error_payload(code: str, message: str, more: Mapping[str, Any] | None = None) -> bytes:
    """An error as JSON, its message cut to `MESSAGE_CHARS_MAX`; ``more``: members beside code and message."""
    text = message if len(message) <= MESSAGE_CHARS_MAX else message[: MESSAGE_CHARS_MAX - 1] + "…"
    try:
        return _encoder.encode({"code": code, "message": text, **(more or {})})
    except UnicodeEncodeError:  # lone surrogates, from undecodable file names
        return _encoder.encode({"code": code, "message": text.encode(errors="replace").decode(), **(more or {})})
