"""What may be declared as a tool, how a host finds it, and how arguments and frames are coded."""

import asyncio
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrt.errors import ConfigError, InputError, UnknownToolError
from agentrt.tools import (
    NOT_FOUND,
    UNKNOWN,
    BatchItem,
    EnvironmentSecrets,
    FileSecrets,
    Found,
    SecretError,
    ToolRegistry,
    ToolSpec,
    describe_tools,
    spec_of,
    tool,
)
from agentrt.tools.binding import MESSAGE_CHARS_MAX, Binding, encode_result, error_payload
from agentrt.tools.importing import resolve
from agentrt.tools.protocol import (
    FRAME_BYTES_MAX,
    Call,
    CallMore,
    FrameError,
    FrameReader,
    ToolRef,
    Work,
    encode_frame,
)
from agentrt.tools.reconcile import encode_found
from agentrt.tools.secretrefs import VALUE_CHARS_MIN, names_in, redact, redact_payload, substitute


@tool(kind="pure", timeout=1.5)
async def lookup(city: str, days: int = 3) -> dict[str, Any]:
    """A docstring."""
    return {"city": city, "days": days}


@tool(kind="keyed", name="mail.send")
def send(to: str, *, idempotency_key: str) -> str:
    return idempotency_key + to


def test_the_decorator_leaves_the_function_as_it_is() -> None:
    assert asyncio.run(lookup("Oslo")) == {"city": "Oslo", "days": 3}
    assert lookup.__name__ == "lookup" and lookup.__doc__ == "A docstring."


def test_spec_says_what_was_declared_and_where_it_is() -> None:
    assert spec_of(lookup) == ToolSpec("lookup", "pure", 1_500_000_000, True, f"{__name__}:lookup")
    assert spec_of(send) == ToolSpec("mail.send", "keyed", 30_000_000_000, False, f"{__name__}:send")
    assert resolve("mail.send", spec_of(send).ref) is send


def find_charge(order: str, *, idempotency_key: str) -> Any:
    return Found(order) if idempotency_key else NOT_FOUND


def charge_all(items: list[BatchItem]) -> list[Any]:
    return [item.args["order"] for item in items]


@tool(
    kind="reconcilable",
    cls="code",
    reconcile=find_charge,
    attempts_max=3,
    batch=charge_all,
    max_batch=10,
    max_wait_ms=2.5,
    secrets=["stripe", "mail", "stripe"],
)
def charge(order: str, cents: int = 1, *, idempotency_key: str) -> str:
    return order


def test_everything_that_may_be_declared_is_in_the_spec() -> None:
    day_ns = 86_400 * 10**9
    assert spec_of(charge) == ToolSpec(
        "charge", "reconcilable", 30_000_000_000, False, f"{__name__}:charge", "code", day_ns, True, 3, 10, 2_500_000,
        ("stripe", "mail"),
    )  # fmt: skip
    assert spec_of(send).key_ttl_ns == day_ns and spec_of(send).max_batch == 1
    assert spec_of(tool(kind="keyed", key_ttl=60)(_module_level)).key_ttl_ns == 60 * 10**9
    assert spec_of(tool(kind="at_most_once")(_module_level)).kind == "at_most_once"


def _module_level(a: int = 0) -> int:
    return a


async def _async_companion(a: int = 0) -> int:
    return a


@pytest.mark.parametrize(
    ("declared", "message"),
    [
        ({"kind": "reconcilable"}, "needs reconcile="),
        ({"kind": "pure", "reconcile": _module_level}, "kind pure is not reconciled"),
        ({"kind": "at_most_once", "reconcile": _module_level}, "not reconciled.*Declare it reconcilable"),
        ({"kind": "pure", "key_ttl": 1}, "key_ttl is for keyed"),
        ({"kind": "keyed", "key_ttl": 0}, "key_ttl is more than 0"),
        ({"kind": "keyed", "key_ttl": float("nan")}, "key_ttl is more than 0"),
        ({"kind": "keyed", "attempts_max": 0}, "attempts_max is 1 to 1000"),
        ({"kind": "keyed", "attempts_max": 2.5}, "attempts_max is 1 to 1000"),
        ({"kind": "pure", "max_batch": 2}, "need batch="),
        ({"kind": "pure", "max_wait_ms": 2}, "need batch="),
        ({"kind": "pure", "batch": _module_level, "max_batch": 1}, "max_batch is 2 to"),
        ({"kind": "pure", "batch": _module_level, "max_wait_ms": -1}, "max_wait_ms is 0 to"),
        ({"kind": "pure", "batch": _module_level, "max_wait_ms": 1001, "timeout": 1}, "max_wait_ms is 0 to"),
        ({"kind": "pure", "batch": _async_companion}, "batch function must be async if the tool is"),
        ({"kind": "keyed", "reconcile": _async_companion}, "reconcile function must be async if the tool is"),
        ({"kind": "keyed", "reconcile": 7}, "is no function"),
        ({"kind": "keyed", "reconcile": lambda nothing_of_its: 1}, "asks for nothing_of_its, which the tool has not"),
        ({"kind": "keyed", "reconcile": lambda *a: 1}, "cannot be given by name"),
        ({"kind": "pure", "cls": "Tool"}, "no class of tools"),
        ({"kind": "pure", "cls": ""}, "no class of tools"),
        ({"kind": "pure", "secrets": "stripe"}, "list of names"),
        ({"kind": "pure", "secrets": ["a__b"]}, "no name of a secret"),
        ({"kind": "pure", "secrets": ["_a"]}, "no name of a secret"),
        ({"kind": "pure", "secrets": ["../a"]}, "no name of a secret"),
    ],
)
def test_declarations_that_mean_nothing_are_refused(declared: dict[str, Any], message: str) -> None:
    def function(a: int = 0) -> int:
        return a

    with pytest.raises(InputError, match=message):
        tool(**declared)(function)


def test_a_registry_knows_a_fixed_set_of_classes() -> None:
    with pytest.raises(InputError, match="tool charge: there is no class 'code'.*Classes: tool, gpu"):
        ToolRegistry([charge], classes=("tool", "gpu"))


@pytest.mark.parametrize("kind", ["", "PURE", "safe", None, 1])
def test_unknown_kinds_are_refused(kind: Any) -> None:
    with pytest.raises(InputError, match="no kind of tool"):
        tool(kind=kind)


@pytest.mark.parametrize("timeout", [0, -1, float("nan"), float("inf"), 90_000])
def test_absurd_timeouts_are_refused(timeout: float) -> None:
    with pytest.raises(InputError, match="timeout"):
        tool(kind="pure", timeout=timeout)


@pytest.mark.parametrize("name", ["", "1st", "a b", "a\n", "x" * 129, "-a", "é"])
def test_odd_names_are_refused(name: str) -> None:
    with pytest.raises(InputError, match="no tool name"):
        tool(kind="pure", name=name)(lambda: None)


def test_signatures_that_json_arguments_cannot_fill_are_refused() -> None:
    def positional_only(a: int, /) -> None: ...
    def variable(*a: int) -> None: ...
    def keywords(**a: int) -> None: ...
    def generator() -> Any:
        yield 1

    async def stream() -> Any:
        yield 1

    for function in (positional_only, variable, keywords, generator, stream):
        with pytest.raises(InputError):
            tool(kind="pure")(function)


def test_a_pure_tool_cannot_ask_for_a_key() -> None:
    def takes_key(*, idempotency_key: str) -> None: ...

    with pytest.raises(InputError, match="pure tool gets no idempotency_key"):
        tool(kind="pure")(takes_key)


def test_what_a_host_could_not_import_is_refused() -> None:
    @tool(kind="pure")
    def inner() -> None: ...

    with pytest.raises(InputError, match="inside a function"):
        spec_of(inner)
    with pytest.raises(InputError, match="is no tool"):
        spec_of(asyncio.sleep)


def test_registry_numbers_tools_and_refuses_a_name_twice() -> None:
    registry = ToolRegistry([lookup, send, lookup])
    assert [spec.name for spec in registry] == ["lookup", "mail.send"] and len(registry) == 2
    assert registry.number("mail.send") == 1 and "lookup" in registry
    with pytest.raises(InputError, match="two tools are called lookup"):
        registry.add(ToolSpec("lookup", "keyed", 1, False, "elsewhere:lookup"))
    with pytest.raises(UnknownToolError, match=r"no tool 'mail'.*Registered: lookup, mail\.send"):
        registry.get("mail")


# --- sources -------------------------------------------------------------------

SOURCE = """
import sys
from agentrt.tools import tool
print("noise on standard output")
import neighbour

@tool(kind="pure")
async def first(a: int) -> int:
    return a

@tool(kind="keyed", name="other")
def second() -> int:
    return neighbour.value

if __name__ == "__main__":
    sys.exit("run as a program")
"""


def test_tools_of_a_file_are_described_without_running_it_here(tmp_path: Path) -> None:
    (tmp_path / "neighbour.py").write_text("value = 7\n")
    file = tmp_path / "mine.py"
    file.write_text(SOURCE)
    before = set(sys.modules)
    specs = describe_tools(str(file))
    assert set(sys.modules) == before
    assert specs == [
        ToolSpec("first", "pure", 30_000_000_000, True, f"{file}:first"),
        ToolSpec("other", "keyed", 30_000_000_000, False, f"{file}:second"),
    ]


def test_tools_of_a_module_are_described_by_its_name() -> None:
    assert [spec.name for spec in describe_tools(__name__)][:2] == ["lookup", "mail.send"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def broken(:\n", "SyntaxError"),
        ("import no_such_module_anywhere\n", "no_such_module_anywhere"),
        ("import sys; sys.exit(3)\n", "status 3"),
        ("import os; os._exit(0)\n", "ended before"),
        ("x = 1\n", "declares no tools"),
        ("from agentrt.tools import tool\n@tool(kind='reconcilable')\ndef f(): ...\n", "needs reconcile"),
    ],
)
def test_sources_without_usable_tools_are_refused(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "bad.py"
    file.write_text(text)
    with pytest.raises(InputError, match=message):
        describe_tools(str(file))


def test_sources_that_do_not_exist_are_refused(tmp_path: Path) -> None:
    for source in (str(tmp_path / "absent.py"), "no_such_module_anywhere"):
        with pytest.raises(InputError):
            describe_tools(source)


# --- arguments and results -----------------------------------------------------


def test_arguments_are_checked_against_the_hints() -> None:
    binding = Binding(lookup)
    assert binding.arguments(b'{"city": "Oslo"}', None, 1) == {"city": "Oslo", "days": 3}
    bad = [b"{}", b'{"city": 1}', b'{"city": "a", "days": "3"}', b'{"city": "a", "more": 1}', b"[]", b"", b"{", b"\xff"]
    for args in (*bad, b'{"city": "\xff"}', b"[" * 100_000, b"null"):
        with pytest.raises((msgspec.MsgspecError, UnicodeDecodeError, RecursionError)):
            binding.arguments(args, None, 1)


def test_a_guest_cannot_set_what_the_runtime_gives() -> None:
    binding = Binding(send)
    assert binding.arguments(b'{"to": "x"}', "key", 1) == {"to": "x", "idempotency_key": "key"}
    with pytest.raises(msgspec.ValidationError, match="idempotency_key"):
        binding.arguments(b'{"to": "x", "idempotency_key": "forged"}', "key", 1)


def test_defaults_that_are_objects_stay_the_same_object() -> None:
    shared: list[int] = [1, 2]

    def with_default(items: list[int] = shared) -> None: ...

    assert Binding(with_default).arguments(b"{}", None, 1)["items"] is shared


def test_results_are_bounded_and_must_be_json() -> None:
    assert encode_result({"a": [1, None]}, 100) == (b'{"a":[1,null]}', None)
    assert encode_result("x" * 98, 100)[1] is None
    assert encode_result("x" * 99, 100)[1] == "tool_result_too_big"
    assert encode_result(object(), 100)[1] == "tool_result"
    assert encode_result("\ud800", 100)[1] == "tool_result"


@given(st.text(), st.text(max_size=10))
def test_errors_are_always_json_and_bounded(text: str, code: str) -> None:
    for message in (text, text * 500, text + "\udc80"):
        decoded = msgspec.json.decode(error_payload("tool_failed", message))
        assert decoded["code"] == "tool_failed" and len(decoded["message"]) <= MESSAGE_CHARS_MAX


# --- reconcile functions -------------------------------------------------------


def test_a_reconcile_function_gets_what_it_asks_for() -> None:
    binding = Binding(charge)
    given = binding.reconcile_arguments(b'{"order": "o", "cents": 5}', "key", 2)
    assert given == {"order": "o", "idempotency_key": "key"}
    with pytest.raises(msgspec.ValidationError):
        binding.reconcile_arguments(b'{"order": 1}', "key", 2)


def test_what_a_reconcile_function_may_answer() -> None:
    assert encode_found(Found({"a": 1}), 100) == (b'{"found":"yes","result":{"a":1}}', None)
    assert encode_found(Found(), 100) == (b'{"found":"yes","result":null}', None)
    assert encode_found(NOT_FOUND, 100) == (b'{"found":"no","result":null}', None)
    assert encode_found(UNKNOWN, 100) == (b'{"found":"unknown","result":null}', None)
    assert encode_found(Found("x" * 99), 100)[1] == "tool_result_too_big"
    for answer in (None, False, "yes", {"found": "yes"}, Found):
        assert encode_found(answer, 100)[1] == "tool_result"


# --- secrets -------------------------------------------------------------------

values = st.dictionaries(
    st.from_regex(r"[a-z]{1,6}", fullmatch=True),
    st.text(st.characters(codec="utf-8"), min_size=VALUE_CHARS_MIN, max_size=12).filter(
        lambda text: "secret" not in text
    ),
    min_size=1,
    max_size=3,
)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.text(st.characters(codec="utf-8")),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(st.characters(codec="utf-8")), inner, max_size=4)
    ),
    max_leaves=12,
)


@given(values, json_values, st.data())
def test_a_value_goes_in_and_never_comes_out(secrets: dict[str, str], other: Any, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(secrets)))
    args = msgspec.json.encode({"deep": [{"token": f"secret://{name}"}], "other": other, "part": f"x secret://{name}"})
    assert name in names_in(args)
    given = msgspec.json.decode(substitute(args, secrets))
    assert given["deep"][0]["token"] == secrets[name]
    assert given["part"] == f"x secret://{name}"  # only a whole string is a reference
    if not any(value in repr(other) for value in secrets.values()):
        assert given["other"] == other
    shown = redact_payload(msgspec.json.encode({secrets[name]: [f"Bearer {secrets[name]}"], "given": given}), secrets)
    decoded = msgspec.json.decode(shown)
    assert not any(value in text for value in secrets.values() for text in _strings(decoded))
    assert secrets[name] not in redact(f"ValueError: {given!r} {secrets[name]}", {name: secrets[name]})


def _strings(value: Any) -> list[str]:
    if isinstance(value, dict):
        return [*value, *(text for item in value.values() for text in _strings(item))]
    if isinstance(value, list):
        return [text for item in value for text in _strings(item)]
    return [value] if isinstance(value, str) else []


def test_a_number_that_is_a_secret_is_taken_out_too() -> None:
    assert redact_payload(b'{"pin":12345678,"other":1234567,"float":0.5}', {"pin": "12345678"}) == (
        b'{"pin":"secret://pin","other":1234567,"float":0.5}'
    )


@given(st.binary(max_size=40))
def test_arguments_that_are_no_json_name_no_secrets(args: bytes) -> None:
    assert isinstance(names_in(args), set)
    assert names_in(b"[" * 100_000) == set()


_PART = st.text(alphabet="a_", min_size=0, max_size=4)


@given(_PART, _PART.filter(bool), _PART, _PART.filter(bool))
def test_no_tenant_reads_anothers_secret_from_the_environment(a: str, x: str, b: str, y: str) -> None:
    """Whatever their names are: one variable is one tenant's at most."""
    secrets = EnvironmentSecrets("S_", {f"S_{a}__{x}": "value"})

    def reads(tenant: str, name: str) -> bool:
        try:
            return secrets.get(tenant, name) == "value"
        except SecretError:
            return False

    assert not (reads(a, x) and reads(b, y)) or (a, x) == (b, y)
    assert reads("a", "_") is (f"{a}__{x}" == "a___")


def test_secrets_of_the_environment_are_per_tenant() -> None:
    environment = {"S_acme__key": "value-of-acme", "S_acme_____key": "odd", "S_other": "x", "PATH": "/bin"}
    secrets = EnvironmentSecrets("S_", environment)
    assert secrets.get("acme", "key") == "value-of-acme" and secrets.environment_prefix == "S_"
    for tenant, name in (("other", "key"), ("acme", "other"), ("", "acme")):
        with pytest.raises(SecretError, match=f"no secret {name}"):
            secrets.get(tenant, name)
    for prefix in ("", "AGENTRT_SECRET_"):
        with pytest.raises(ConfigError):
            EnvironmentSecrets(prefix, environment)


def test_secrets_in_files_must_be_private(tmp_path: Path) -> None:
    folder = tmp_path / "secrets"
    folder.mkdir(mode=0o700)
    (folder / "a%2Fb").mkdir(mode=0o700)
    file = folder / "a%2Fb" / "key"
    file.write_text("value-of-it\n")
    file.chmod(0o600)
    secrets = FileSecrets(folder)
    assert secrets.get("a/b", "key") == "value-of-it"
    file.write_text("replaced-value")
    assert secrets.get("a/b", "key") == "replaced-value"
    for mode in (0o640, 0o604, 0o660):
        file.chmod(mode)
        with pytest.raises(SecretError, match="mode 0600"):
            secrets.get("a/b", "key")
    file.chmod(0o400)
    assert secrets.get("a/b", "key")
    file.chmod(0o600)
    (folder / "a%2Fb" / "link").symlink_to(file)
    (folder / "a%2Fb" / "folder").mkdir()
    (folder / "a%2Fb" / "raw").write_bytes(b"\xff" * 10)
    (folder / "a%2Fb" / "raw").chmod(0o600)
    for tenant, name in (("a/b", "link"), ("a/b", "folder"), ("a/b", "raw"), ("a/b", "../a%2Fb/key"), ("..", "key"),
                         ("", "key"), ("a/b", "missing"), ("nobody", "key")):  # fmt: skip
        with pytest.raises(SecretError) as caught:
            secrets.get(tenant, name)
        assert caught.value.code == "tool_secret"
    (folder / "a%2Fb").chmod(0o770)
    with pytest.raises(SecretError, match="others may write"):
        secrets.get("a/b", "key")
    folder.chmod(0o777)
    with pytest.raises(ConfigError):
        FileSecrets(folder)
    with pytest.raises(ConfigError):
        FileSecrets(tmp_path / "absent")


# --- frames --------------------------------------------------------------------

mores = st.builds(
    CallMore,
    st.integers(0, 2**60),
    st.booleans(),
    st.none() | st.dictionaries(st.text(max_size=9), st.text(max_size=20), max_size=2),
)
calls = st.builds(
    Call,
    st.integers(0, 2**60),
    st.integers(0, 1000),
    st.binary(max_size=2000),
    st.none() | st.text(max_size=20),
    st.integers(1, 5),
    st.integers(1, 2**60),
    st.none() | mores,
)
refs = st.builds(ToolRef, st.integers(0, 1000), st.text(), st.text())
works = st.builds(Work, st.lists(calls, max_size=5), st.lists(refs, max_size=3), st.lists(st.integers(0, 2**60)))


@given(st.lists(works, max_size=8), st.data())
def test_frames_survive_any_cut(sent: list[Work], data: st.DataObject) -> None:
    stream = b"".join(encode_frame(work) for work in sent)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=20)))
    reader = FrameReader()
    received = []
    for begin, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        # A fresh buffer each time, overwritten afterwards: nothing decoded may look into it.
        buffer = bytearray(stream[begin:end])
        received += [msgspec.msgpack.decode(body, type=Work) for body in reader.feed(memoryview(buffer))]
        buffer[:] = bytes(len(buffer))
    assert received == sent and reader.rest_bytes == 0


def test_an_absurd_length_is_no_frame() -> None:
    with pytest.raises(FrameError):
        list(FrameReader().feed(memoryview((FRAME_BYTES_MAX + 1).to_bytes(4, "little"))))
