"""Calls: what goes in, what comes out, and how they end."""

import asyncio
import base64
import json
import math
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from agentrt_sandbox.images import ImageMaker
from sandbox_kit import MIB, RUNTIMES, Sandbox

from agentrt.errors import ClosedError, ModuleError, QueueFullError

pytestmark = pytest.mark.timeout(1_800)
PYTHONS = ("micropython", "cpython")


def ok(result: dict[str, Any]) -> Any:
    assert result["error"] is None, result
    return result["value"]


@pytest.mark.parametrize("runtime", PYTHONS)
@pytest.mark.parametrize(
    ("code", "value"),
    [
        ("1 + 1", 2),
        ("x = 2\nx * 3  # six\n\n", 6),
        ("x = [\n  1,\n  2,\n]\nx", [1, 2]),
        ("def f(n):\n    return n * 2\n\nf(\n  21\n)", 42),
        ("if True:\n    y = 1\ny", 1),
        ("for i in range(3):\n    i", None),
        ("result = {'a': [None, True, 1.5, 'é']}", {"a": [None, True, 1.5, "é"]}),
        ("result = 1\n2", 2),
        ("'''a\nb'''", "a\nb"),
        ("x = 1 + \\\n 2", None),
        ("x = '''\n5'''\n7", 7),
        ("", None),
        ("# nothing", None),
        ("(1, 2)", [1, 2]),
        ("import math\nmath.floor(math.pi)", 3),
        ("import sys\nsys.exit(0)\n5", None),
        ("class A:\n    def f(self): return 3\nA().f()", 3),
        ("[n * k for k in ks]", [2, 4]),
        ("__name__", "__main__"),
        ("from math import pi\nround(pi, 2)", 3.14),
    ],
)
def test_python_has_a_value(sandbox: Sandbox, runtime: str, code: str, value: Any) -> None:
    assert ok(sandbox.run(runtime, code, variables={"n": 2, "ks": [1, 2]})) == value


@pytest.mark.parametrize(
    ("code", "value"),
    [
        ("1 + 1", 2),
        ("let x = 2; x * 3 // six", 6),
        ("const f = (n) => n * 2;\nf(21)", 42),
        ("({a: [null, true, 1.5, 'é', undefined]})", {"a": [None, True, 1.5, "é", None]}),
        ("await new Promise((done) => setTimeout(() => done(7), 3_600_000))", 7),
        ("Promise.resolve(5)", 5),
        ("(async () => { await null; return 'x' })()", "x"),
        ("", None),
        ("ks.map((k) => n * k)", [2, 4]),
        ("new Map([[1, 2]]).get(1)", 2),
        ("NaN", None),
        ("typeof std + typeof os", "undefinedundefined"),
    ],
)
def test_javascript_has_a_value(sandbox: Sandbox, code: str, value: Any) -> None:
    assert ok(sandbox.run("quickjs", code, variables={"n": 2, "ks": [1, 2]})) == value


@pytest.mark.parametrize(
    ("runtime", "code", "shown"),
    [
        *((runtime, "float('nan')", "nan") for runtime in PYTHONS),
        *((runtime, "10 ** 30", str(10**30)) for runtime in PYTHONS),
        *((runtime, "{1: 2}", "{1: 2}") for runtime in PYTHONS),
        *((runtime, "b'ab'", "b'ab'") for runtime in PYTHONS),
        ("cpython", "x = []\nx.append(x)\nx", "[[...]]"),
        ("quickjs", "() => 1", "() => 1"),
        ("quickjs", "10n", "10"),
        ("quickjs", "const x = []; x.push(x); x", "[object Array]"),
    ],
)
def test_what_is_no_json_is_shown(sandbox: Sandbox, runtime: str, code: str, shown: str) -> None:
    result = sandbox.run(runtime, code)
    assert ok(result) is None and result["repr"] == shown


@pytest.mark.parametrize("runtime", PYTHONS)
def test_files_of_python_go_in_and_out_by_value(sandbox: Sandbox, runtime: str) -> None:
    code = """
import json
with open("in/a.txt") as f:
    lines = [line.strip() for line in f]
with open("out.json", "w") as f:
    json.dump({"lines": lines}, f)
    print(file=f)
raw = open("/b.bin", "rb").read()
f = open("c.bin", "wb")
f.write(raw + bytes([1]))
f.close()
with open("in/a.txt", "a") as f:
    f.write("more")
open("left_open.txt", "w").write("x")
with open("twice.txt", "w") as f:
    f.write("first")
with open("twice.txt", "w") as f:
    f.write("second")
[lines, open("in/a.txt").read(), open("twice.txt").read()]
"""
    files = {"in/a.txt": "one\ntwo\n", "./b.bin": {"base64": base64.b64encode(b"\0\xff").decode()}}
    result = sandbox.run(runtime, code, files=files)
    assert ok(result) == [["one", "two"], "one\ntwo\nmore", "second"]
    binary = {"base64": base64.b64encode(b"\0\xff\1").decode()}
    assert result["files"].pop("c.bin") == binary
    assert json.loads(result["files"].pop("out.json")) == {"lines": ["one", "two"]}
    assert result["files"] == {"in/a.txt": "one\ntwo\nmore", "left_open.txt": "x", "twice.txt": "second"}


def test_files_of_javascript_go_in_and_out_by_value(sandbox: Sandbox) -> None:
    code = """
writeFile("out.txt", readFile("in/a.txt").toUpperCase() + "é");
writeFile("c.bin", Uint8Array.from([...readBytes("b.bin"), 1]));
[readFile("out.txt"), readBytes("out.txt").length]
"""
    files = {"in/a.txt": "one", "b.bin": {"base64": base64.b64encode(b"\0\xff").decode()}}
    result = sandbox.run("quickjs", code, files=files)
    assert ok(result) == ["ONEé", 5]
    assert result["files"] == {"out.txt": "ONEé", "c.bin": {"base64": base64.b64encode(b"\0\xff\1").decode()}}


@pytest.mark.parametrize("runtime", PYTHONS)
def test_python_finds_given_files_and_no_others(sandbox: Sandbox, runtime: str) -> None:
    code = """
import os
found = []
for path in ("/etc/passwd", "../x", "/proc/self/environ", "missing"):
    try:
        open(path)
    except OSError as error:
        found.append(error.errno)
[sorted(name for name in os.listdir("/") if name.endswith(".csv")), found]
"""
    names, errors = ok(sandbox.run(runtime, code, files={"a.csv": "1", "b.csv": "2"}))
    assert names == ["a.csv", "b.csv"] and len(errors) == 4
    assert ok(sandbox.run(runtime, "import os\nsorted(n for n in os.listdir('/') if n.endswith('.csv'))")) == []


@pytest.mark.parametrize(
    ("runtime", "code", "type"),
    [
        *((runtime, "x = 1\n\nx / 0", "ZeroDivisionError") for runtime in PYTHONS),
        ("quickjs", "const x = null;\n\nx.y", "TypeError"),
        ("quickjs", "Promise.reject(new RangeError('no'))", "RangeError"),
        ("quickjs", "await Promise.reject(new RangeError('no'))", "RangeError"),
    ],
)
def test_what_code_raises_is_told_with_what_it_wrote(sandbox: Sandbox, runtime: str, code: str, type: str) -> None:
    said = {"quickjs": "console.log('out'); console.error('err');"}.get(runtime, "import sys\nprint('out')\n")
    result = sandbox.run(runtime, said + code)
    error = result["error"]
    assert (error["code"], error["type"]) == ("raised", type)
    assert result["value"] is None and result["stdout"] == "out\n"
    assert runtime != "quickjs" or result["stderr"] == "err\n"


@pytest.mark.parametrize("runtime", PYTHONS)
def test_tracebacks_say_the_line(sandbox: Sandbox, runtime: str) -> None:
    for code in ("a = 1\n\n1 / 0", "a = 1\n\n1 / 0\nb = 2", "def f():\n    pass\n    1 / 0\nf()"):
        traceback = sandbox.run(runtime, code)["error"]["traceback"]
        assert 'File "<code>", line 3' in traceback and "harness" not in traceback


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_wrong_code_is_a_syntax_error(sandbox: Sandbox, runtime: str) -> None:
    assert sandbox.run(runtime, "1 +")["error"]["code"] == "syntax"


LOOPS = {"micropython": "while True: pass", "cpython": "while True: pass", "quickjs": "for (;;) {}"}
BOMBS = {
    "micropython": "x = []\nwhile True: x.append(bytearray(100000))",
    "cpython": "x = []\nwhile True: x.append(bytearray(100000))",
    "quickjs": "const x = []; for (;;) x.push(new Uint8Array(100000))",
}
NESTED = {
    "micropython": "def f(): f()\nf()",
    "cpython": "def f(): f()\nf()",
    "quickjs": "const f = () => f(); f()",
}
FLOODS = {
    "micropython": "for i in range(20000): print(i)\n1",
    "cpython": "for i in range(20000): print(i)\n1",
    "quickjs": "for (let i = 0; i < 20000; i++) console.log(i); 1",
}
BIG = {"micropython": "'x' * 70000", "cpython": "'x' * 70000", "quickjs": "'x'.repeat(70000)"}


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_which_limit_was_hit_is_told(cache: Path, sandbox: Sandbox, runtime: str) -> None:
    fuel = 2_000_000_000
    error = sandbox.run(runtime, LOOPS[runtime], fuel=fuel)["error"]
    assert (error["code"], error["limit"], error["limit_value"]) == ("fuel", "fuel", fuel) and error["hint"]
    result = sandbox.run(runtime, BOMBS[runtime], memory_bytes=48 * MIB)
    error = result["error"]
    assert error["code"] == "memory", result
    assert (error["code"], error["limit"], error["limit_value"]) == ("memory", "memory_bytes", 48 * MIB)
    assert sandbox.run(runtime, NESTED[runtime])["error"]["code"] == "stack"
    error = sandbox.run(runtime, LOOPS[runtime], fuel=10**11, time_ms=300)["error"]
    assert (error["code"], error["limit"], error["limit_value"]) == ("time", "time_ms", 300)
    result = sandbox.run(runtime, FLOODS[runtime], output_bytes=1000)
    assert ok(result) == 1 and result["stdout"].startswith("… (the beginning is cut)\n")
    assert result["stdout"].endswith("\n19999\n") and len(result["stdout"]) < 1100


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_a_result_that_is_too_big_is_told(cache: Path, runtime: str) -> None:
    with Sandbox(cache, result_bytes=65536) as sandbox:
        error = sandbox.run(runtime, BIG[runtime])["error"]
        assert (error["code"], error["limit"], error["limit_value"]) == ("result", "result_bytes", 65536)
        assert ok(sandbox.run(runtime, "1")) == 1


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_the_same_call_is_the_same_to_the_byte(sandbox: Sandbox, runtime: str) -> None:
    code = {
        "micropython": "import time\n[time.time_ns(), time.ticks_us(), id(object())]",
        "cpython": "import random, time, os\n[random.random(), time.time(), list(os.urandom(4)), hash('a')]",
        "quickjs": "[Math.random(), Date.now(), performance.now()]",
    }[runtime]
    tool = "js.exec" if runtime == "quickjs" else "python.exec"
    args = {"code": code, "runtime": runtime}
    one, two = sandbox.call(tool, args), sandbox.call(tool, args, tenant="hooli", tier=3)
    assert one.payload == two.payload and b'"error":null' in one.payload
    other = sandbox.call(tool, args | {"variables": {"n": 1}})
    assert json.loads(other.payload)["value"] != json.loads(one.payload)["value"]


def test_random_numbers_of_javascript_are_the_calls_own(sandbox: Sandbox) -> None:
    """Its clones have all been booted with the same seed."""
    drawn = [ok(sandbox.run("quickjs", "[Math.random(), Math.random()]", variables={"n": n})) for n in (1, 2, 1)]
    assert drawn[0] == drawn[2] and len({*drawn[0], *drawn[1]}) == 4
    many = ok(sandbox.run("quickjs", "Array.from({length: 2000}, Math.random)"))
    assert all(0 <= each < 1 for each in many) and 0.4 < sum(many) / len(many) < 0.6


@pytest.fixture
def images(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Images are there once it is set."""
    there, image_of = threading.Event(), ImageMaker.image_of

    async def later(maker: ImageMaker, name: str, digests: dict[str, str]) -> bytes:
        await asyncio.to_thread(there.wait)
        return await image_of(maker, name, digests)

    monkeypatch.setattr(ImageMaker, "image_of", later)
    yield there
    there.set()


def test_calls_wait_for_their_image_and_are_as_later_ones(cache: Path, images: threading.Event) -> None:
    """Nobody else waits for it, and it makes no difference to the result, fuel included."""
    with Sandbox(cache, calls_max=1, waiting_max=4) as sandbox:
        args = {"code": "1 + 1", "runtime": "cpython"}
        first, second, dropped = (sandbox.begin("python.exec", args, tier=tier) for tier in (3, 0, 2))
        assert ok(sandbox.run("micropython", "2 + 2")) == 4
        statistics = sandbox.do(sandbox.tools.statistics)
        assert (statistics.running, statistics.waiting, statistics.booted) == (0, 3, ())
        sandbox.do(lambda: sandbox.tools.cancel(dropped[0]))
        assert dropped[1].result(60).code == "cancelled"
        sandbox.begin("python.exec", args)
        sandbox.begin("js.exec", {"code": "1"})
        with pytest.raises(QueueFullError):
            sandbox.begin("js.exec", {"code": "1"})
        images.set()
        waited = [first[1].result(1_500).payload, second[1].result(1_500).payload]
        later = sandbox.call("python.exec", args)
        assert waited == [later.payload] * 2
        assert json.loads(later.payload)["fuel"] < 50_000_000  # booting takes ten times as much
        statistics = sandbox.do(sandbox.tools.statistics)
        assert (statistics.waiting, statistics.booted) == (0, ("cpython", "quickjs"))


def test_calls_that_wait_for_an_image_end_with_the_node(cache: Path, images: threading.Event) -> None:
    with Sandbox(cache) as sandbox:
        begun = sandbox.begin("js.exec", {"code": "1"})[1]
        sandbox.do(sandbox.tools.stop)
        assert begun.result(60).evicted
        images.set()


@pytest.mark.parametrize("why", ["settings", "refused"])
def test_without_an_image_interpreters_boot(cache: Path, monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    async def refuse(maker: ImageMaker, name: str, digests: dict[str, str]) -> bytes:
        raise ModuleError("no")

    monkeypatch.setattr(ImageMaker, "image_of", refuse)
    with Sandbox(cache, images=why == "refused") as sandbox:
        result = sandbox.run("cpython", "1 + 1")
        assert ok(result) == 2 and result["fuel"] > 100_000_000
        assert ok(sandbox.run("quickjs", "1 + 1")) == 2
        assert sandbox.do(sandbox.tools.statistics).booted == ()


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_the_least_memory_is_too_little_at_worst(sandbox: Sandbox, runtime: str) -> None:
    result = sandbox.run(runtime, "1 + 1", memory_bytes=8 * MIB)
    assert result["value"] == 2 or result["error"]["code"] == "memory"


@pytest.mark.parametrize("clock", ["fixed", "real"])
def test_the_clock_is_real_when_it_is_granted(cache: Path, clock: str) -> None:
    import time

    with Sandbox(cache, clock=clock) as sandbox:
        before = time.time()
        found = ok(sandbox.run("micropython", "import time\ntime.time()"))
        assert (math.floor(before) - 1 <= found) is (clock == "real")
        slept = ok(sandbox.run("micropython", "import time\na = time.time()\ntime.sleep(3600)\ntime.time() - a"))
        assert slept >= 3600  # at once


@pytest.mark.parametrize("op", ["tool.call", "model.generate", "run.spawn", "log", "emit", "output.", "checkpoint"])
def test_code_has_no_syscalls(sandbox: Sandbox, op: str) -> None:
    result = sandbox.run("micropython", f"import host\nhost.call('{op}', '{{}}')")
    if op == "output.":
        assert "unknown_op" in ok(result)
    else:
        assert result["error"]["code"] == "syscall" and result["value"] is None


def test_results_that_code_forges_are_no_harm(sandbox: Sandbox) -> None:
    """It may say what it likes in its result, which is its own; what makes no sense is no result."""
    for said in (b"{}", b"[", b'{"error":{"kind":"no such"}}', b"\xff", b'{"value":1,"files":{"a":1}}', b'{"value":[}'):
        code = f"import os\nfd = os.open('/dev/result', os.O_WRONLY)\nos.write(fd, {said!r})\n"
        result = sandbox.run("cpython", code + "os._exit(0)")
        assert result["value"] is None and result["files"] == {}
        assert said == b"{}" or result["error"]["code"] == "exited"
        # or before the harness writes its own
        assert sandbox.run("cpython", code + "1")["error"]["code"] == "exited"
    code = "import host\nhost.call('output', '{\"value\": 5}')\nimport sys\nsys.modules.clear()\nsys.exit(0)"
    assert sandbox.run("micropython", code)["value"] is None


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (b"[]", "arguments"),
        (b'{"code": 1}', "code"),
        (b'{"code": "1", "cod": 1}', "cod"),
        (b'{"code": "1", "runtime": "quickjs"}', "quickjs"),
        (b'{"code": "1", "fuel": 1000000000000000000}', "fuel"),
        (b'{"code": "1", "fuel": -1}', "fuel"),
        (b'{"code": "1", "memory_bytes": 1}', "memory_bytes"),
        (b'{"code": "1", "files": {"../a": ""}}', "path"),
        (b'{"code": "1", "files": {"agentrt_harness.mpy": ""}}', "agentrt_harness"),
        (b'{"code": "1", "files": {"dev/result": ""}}', "dev/result"),
        (b'{"code": "1", "files": {"a": "", "a/b": ""}}', "directory"),
        (b'{"code": "1", "files": {"a": {"base64": "???"}}}', "base64"),
        (b'{"code": "1", "variables": {"a b": 1}}', "variable"),
        (b'{"code": "1", "variables": {"a": ' + b"[" * 5000 + b"]" * 5000 + b"}}", ""),
        (b'{"code": "\xff"}', ""),
    ],
)
def test_wrong_arguments_are_refused(sandbox: Sandbox, args: bytes, says: str) -> None:
    outcome = sandbox.call("python.exec", args)
    if outcome.ok:  # the harness may have read what is too deep for others
        assert says == ""
    else:
        assert outcome.code == "tool_args" and says in json.loads(outcome.payload)["message"]


def test_calls_wait_for_a_place_and_more_are_refused(cache: Path) -> None:
    with Sandbox(cache, calls_max=1, waiting_max=3) as sandbox:
        sandbox.run("micropython", "1")
        loop = {"code": "while True: pass", "fuel": 10**11, "time_ms": 60_000}
        running, ended = sandbox.begin("python.exec", loop)
        waiting = [sandbox.begin("python.exec", {"code": str(n)}, tier=3 - n) for n in range(3)]
        with pytest.raises(QueueFullError):
            sandbox.begin("python.exec", {"code": "4"})
        statistics = sandbox.do(sandbox.tools.statistics)
        assert (statistics.running, statistics.waiting) == (1, 3)
        sandbox.do(lambda: sandbox.tools.cancel(waiting[1][0]))
        assert waiting[1][1].result(60).code == "cancelled"
        sandbox.do(lambda: sandbox.tools.cancel(running))
        assert ended.result(60).code == "cancelled"
        assert [json.loads(waiting[n][1].result(60).payload)["value"] for n in (0, 2)] == [0, 2]
        assert sandbox.do(sandbox.tools.statistics).running == 0


def test_the_wall_bounds_what_waits_for_the_cpu(cache: Path) -> None:
    with Sandbox(cache, timeout_ms=500) as sandbox:
        sandbox.run("micropython", "1")
        loop = {"code": "while True: pass", "fuel": 10**11, "time_ms": 60_000}
        assert sandbox.call("python.exec", loop).code == "tool_timeout"
        assert sandbox.call("python.exec", loop, timeout_ns=1).code == "tool_timeout"


def test_when_the_node_stops_running_calls_are_evicted_without_an_effect(cache: Path) -> None:
    with Sandbox(cache, calls_max=1) as sandbox:
        sandbox.run("micropython", "1")
        loop = {"code": "while True: pass", "fuel": 10**11, "time_ms": 60_000}
        begun = [sandbox.begin("python.exec", loop)[1] for _ in range(3)]
        sandbox.do(sandbox.tools.stop)
        sandbox.do(sandbox.tools.evict)
        for each in begun:
            outcome = each.result(60)
            assert outcome.evicted and not outcome.ok and not outcome.unknown
    with pytest.raises(ClosedError):
        sandbox.tools.call("python.exec", b"{}", key="k", tenant="a", tier=1, attempt=1, done=print)
