"""The lines of agent processes: what is written is read, on both sides, and both clients know the whole table."""

import ast
import json
import re
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrt import process_client
from agentrt.backends.process.agents.protocol import (
    ABI,
    UNNUMBERED,
    Ask,
    Begin,
    Failed,
    LineError,
    LineReader,
    Ready,
    Returned,
    Snapshot,
    Wait,
    answer_line,
    decode_line,
    start_lines,
    unwind_line,
    value_line,
)
from agentrt.syscalls import TABLE

ROOT = Path(__file__).parents[2]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(), lambda inner: st.lists(inner, max_size=3)
)
PRETTY = JSON.map(lambda value: json.dumps({"value": value}, indent=2).encode())


@given(PRETTY, PRETTY, st.none() | PRETTY)
def test_what_a_process_is_told_is_one_line_each_with_its_payload_last(a: bytes, b: bytes, c: bytes | None) -> None:
    begin = Begin(ABI, "run_1", "acme", 5, 10, 20, c is not None)
    lines = start_lines(begin, a, c).splitlines()
    lines += [answer_line(7, True, b, 9).rstrip(b"\n"), value_line(b"1").rstrip(b"\n")]
    told = [json.loads(line) for line in lines]
    assert told[0]["start"]["restored"] is (c is not None)
    assert told[1] == {"input": json.loads(a)}
    if c is not None:
        assert told[2] == {"restored": json.loads(c)}
    assert told[-2] == {"answer": 7, "ok": True, "clock_ns": 9, "value": json.loads(b)}
    # what a program without a JSON parser goes by:
    assert lines[1][len(b'{"input":') : -1] == a.replace(b"\n", b" ")
    assert lines[-2].startswith(b'{"answer":7,"ok":true,"clock_ns":9,"value":') and lines[-2].endswith(b"}")
    assert lines[0].endswith(b'"restored":true}}' if c is not None else b'"restored":false}}')


@given(st.text())
def test_a_reason_is_any_text(why: str) -> None:
    (line,) = unwind_line(why.encode(errors="replace").decode()).splitlines()
    assert json.loads(line)["unwind"] == why.encode(errors="replace").decode()


@given(st.lists(st.binary(max_size=30).map(lambda data: data.replace(b"\n", b"")), max_size=8), st.data())
def test_lines_come_out_as_they_went_in_however_they_are_cut(lines: list[bytes], data: Any) -> None:
    stream = b"".join(line + b"\n" for line in lines)
    reader, found = LineReader(30), []
    while stream:
        size = data.draw(st.integers(1, len(stream)))
        reader.add(stream[:size])
        stream = stream[size:]
        while (line := reader.line()) is not None:
            found.append(line)
    assert found == lines


def test_a_line_that_is_too_long_is_refused_before_it_ends() -> None:
    reader = LineReader(10)
    reader.add(b"0123456789\n0123456789")
    assert reader.line() == b"0123456789" and reader.line() is None
    reader.add(b"x")
    with pytest.raises(LineError, match="more than 10 bytes"):
        reader.line()


@given(JSON)
def test_what_the_client_writes_is_read(value: Any) -> None:
    assert decode_line(b'{"return":%b}' % process_client._json(value)) == Returned(process_client._json(value))
    state = process_client._json([value])
    assert decode_line(b'{"snapshot":%b}' % state) == Snapshot(state)
    ask = decode_line(b'{"ask":1,"op":"emit","request":%b}' % process_client._json({"data": value}))
    assert isinstance(ask, Ask) and msgspec.json.decode(ask.payload) == {"data": value}


def test_each_kind_of_line() -> None:
    assert decode_line(b'{"ready":1}') == Ready(1)
    assert decode_line(b'{"wait":[3,1]}') == Wait((3, 1))
    assert decode_line(b'{"ask":0,"op":"clock.now"}').payload == b"{}"  # type: ignore[union-attr]
    assert decode_line(b'{"fail":{"code":"a","message":"b","c":1}}') == Failed(b'{"code":"a","message":"b","c":1}')
    wrong = [b"", b"[]", b"{}", b'{"wait":[0]}', b'{"wait":[1],"op":"emit"}', b'{"unwound":false}', b'{"x":1}']
    wrong += [
        b'{"ask":1,"op":"clock.now"}',
        b'{"ask":-1,"op":"emit"}',
        b'{"wait":' + b"[" * 9_999,
        b'{"return":"\xff"}',
    ]
    for line in wrong:
        with pytest.raises(LineError):
            decode_line(line)


def test_ops_without_a_number_are_those_that_are_no_steps() -> None:
    assert {row.op for row in TABLE if row.number in UNNUMBERED} == {"log", "clock.now", "random.bytes"}


def test_the_clients_know_the_table() -> None:
    python = (ROOT / "agentrt" / "process_client.py").read_text()
    ops = set(re.findall(r'"([a-z]+(?:\.[a-z]+)?)"', python))
    missing = {row.op for row in TABLE} - ops
    assert missing == {"lock.foreign"}, "which needs code of its own to release it: any op can be asked for with `call`"
    assert f"#define AGENTRT_PROCESS_ABI {ABI}\n" in (ROOT / "csrc" / "agentrt_process.h").read_text()
    assert process_client.ABI == ABI


def test_the_python_client_is_one_file_that_needs_nothing() -> None:
    tree = ast.parse((ROOT / "agentrt" / "process_client.py").read_text())
    imported = {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    imported |= {name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names}
    assert imported and all(name.partition(".")[0] in sys.stdlib_module_names for name in imported)
