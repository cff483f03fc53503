"""What may be declared as a tool, how a host finds it, and how arguments and frames are coded."""

import asyncio
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrt.errors import InputError, UnknownToolError
from agentrt.tools import ToolRegistry, ToolSpec, describe_tools, spec_of, tool
from agentrt.tools.binding import MESSAGE_CHARS_MAX, Binding, encode_result, error_payload
from agentrt.tools.importing import resolve
from agentrt.tools.protocol import (
    FRAME_BYTES_MAX,
    Call,
    FrameError,
    FrameReader,
    ToolRef,
    Work,
    encode_frame,
)


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


@pytest.mark.parametrize("kind", ["reconcilable", "at_most_once"])
def test_kinds_not_served_yet_are_refused_by_name(kind: Any) -> None:
    with pytest.raises(InputError, match=f"{kind}.*not served"):
        tool(kind=kind)


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
    assert [spec.name for spec in describe_tools(__name__)] == ["lookup", "mail.send"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def broken(:\n", "SyntaxError"),
        ("import no_such_module_anywhere\n", "no_such_module_anywhere"),
        ("import sys; sys.exit(3)\n", "status 3"),
        ("import os; os._exit(0)\n", "ended before"),
        ("x = 1\n", "declares no tools"),
        ("from agentrt.tools import tool\n@tool(kind='at_most_once')\ndef f(): ...\n", "not served"),
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


# --- frames --------------------------------------------------------------------

calls = st.builds(
    Call,
    st.integers(0, 2**60),
    st.integers(0, 1000),
    st.binary(max_size=2000),
    st.none() | st.text(max_size=20),
    st.integers(1, 5),
    st.integers(1, 2**60),
)
refs = st.builds(ToolRef, st.integers(0, 1000), st.text(), st.text())
works = st.builds(Work, st.lists(calls, max_size=5), st.lists(refs, max_size=3))


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
