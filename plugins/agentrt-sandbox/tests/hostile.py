# ruff: noqa: E501
"""Hostile scripts, made from a number: loops, bombs, recursion, imports, floods, traps, and what they make together."""

import random
from typing import NamedTuple

MIB = 1 << 20


class Script(NamedTuple):
    """``ends``: the codes with which it may end; "" is a result."""

    runtime: str
    code: str
    ends: frozenset[str]


_ANY = frozenset({"", "raised", "syntax", "exited", "fuel", "memory", "stack", "result", "crashed", "time"})
_PYTHON = {
    "loop": "while True:\n    {x} = {n}",
    "nested loops": "for a in range(10**9):\n    for b in range(10**9):\n        {x} = a * b",
    "big number": "{x} = 3\nwhile True:\n    {x} = {x} * {x}",
    "power": "{x} = {n} ** ({n} ** 9)",
    "generator": "def g():\n    while True: yield {n}\nsum(g())",
    "list bomb": "{x} = [{n}]\nwhile True:\n    {x} = {x} + {x}",
    "dict bomb": "{x} = {{}}\ni = 0\nwhile True:\n    {x}[i] = 'v' * {n}\n    i += 1",
    "string bomb": "{x} = 'ab'\nwhile True:\n    {x} += {x}",
    "bytes at once": "{x} = bytearray({n} * 1000000000)",
    "append": "{x} = []\nwhile True:\n    {x}.append(bytearray({n} * 100))",
    "recursion": "def {x}(n):\n    return {x}(n + 1) + 1\n{x}(0)",
    "mutual recursion": "def a(n): return b(n)\ndef b(n): return a([n])\na({n})",
    "repr of itself": "{x} = []\n{x}.append({x})\nstr({x})",
    "deep value": "{x} = []\nfor i in range({n} * 1000): {x} = [{x}]\n{x}",
    "deep code": "{x} = " + "(" * 3000 + "1" + ")" * 3000,
    "deep lists": "{x} = " + "[" * 400 + "]" * 400,
    "long code": "{x} = 0\n" + "{x} += 1\n" * 3000 + "{x}",
    "eval of eval": "s = '1'\nfor i in range({n} * 100): s = 'eval(' + repr(s) + ')' if len(s) < 5000 else s\neval(s)",
    "catch all": "while True:\n    try:\n        while True: pass\n    except BaseException:\n        pass",
    "catch memory": "{x} = []\nwhile True:\n    try:\n        {x}.append(bytearray(100000))\n    except MemoryError:\n        pass",
    "flood": "while True: print('x' * {n} * 100)",
    "flood of errors": "import sys\nwhile True: sys.stderr.write('x' * {n} * 100)",
    "big file": "f = open('big', 'w')\nwhile True: f.write('x' * 10000)",
    "many files": "for i in range({n} * 100): open('f%d' % i, 'w').write('x')\n1",
    "big result": "['x' * 1000] * {n} * 1000",
    "import": "import socket\nsocket.socket().connect(('127.0.0.1', 80))",
    "imports": "for name in ('os', 'subprocess', 'ctypes', 'socket', 'threading', 'multiprocessing', 'host', 'uctypes'):\n"
    "    try: __import__(name)\n    except Exception: pass\nopen('/etc/shadow').read()",
    "processes": "import os\nos.system('id')\nos.fork()",
    "environment": "import os\nopen('/proc/1/environ', 'rb').read()",
    "exit": "import sys\nsys.exit({n})",
    "no modules": "import sys\nsys.modules.clear()\nimport builtins\nbuiltins.__dict__.clear()\n1",
    "no names": "globals().clear()\n{n}",
    "harness": "import sys\nfor name in list(sys.modules):\n    m = sys.modules[name]\n"
    "    for k in dir(m):\n        try: setattr(m, k, None)\n        except Exception: pass\n1",
    "writes the result": "f = open('/dev/result', 'wb')\nf.write(b'[' * 100000)\nf.close()\n1",
    "sleep": "import time\nwhile True: time.sleep(100000)",
    "unicode": "'\\ud800' * {n}",
    "nul": "x = 'a\\x00b' * {n}\nprint(x)\nx",
}
_MICROPYTHON = {
    "memory as it is": "import machine\ni = {n}\nwhile True:\n    machine.mem32[i * 4] = i\n    i += 7",
    "structs": "import uctypes\nuctypes.bytearray_at(1024, {n} * 1000000)[:] = bytes({n} * 1000000)",
    "collector": "import gc\ngc.enable()\n{x} = [[i] for i in range(10000)]\nwhile True:\n    gc.collect()\n    {x} = [{x}]",
    "viper": "import micropython\n@micropython.viper\ndef f() -> int:\n    p = ptr32({n})\n    p[0] = 1\n    return 1\nf()",
}
_CPYTHON = {
    "exit at once": "import os\nos._exit({n})",
    "abort": "import os\nos.abort()",
    "signal": "import signal\nsignal.raise_signal(signal.SIGSEGV)",
    "code object": "import types\nf = lambda: 1\ntypes.FunctionType(f.__code__.replace(co_code=bytes([100, 255, 83, 0] * {n})), {{}})()",
    "regular expression": "import re\nre.match('(a+)+$', 'a' * 40 + 'b')",
    "finaliser": "class {x}:\n    def __del__(self):\n        while True: pass\n{x}()",
    "recursion limit": "import sys\nsys.setrecursionlimit(10**9)\ndef f(): f()\nf()",
    "threads": "import threading\nthreading.Thread(target=lambda: 1).start()",
    "pickle": "import pickle\npickle.loads(b'cos\\nsystem\\n(S\"id\"\\ntR.')",
    "zip bomb": "import zlib\nzlib.decompress(zlib.compress(bytes({n} * 10000000)) * 10)",
}
_JAVASCRIPT = {
    "loop": "for (;;) {{ globalThis.{x} = {n} }}",
    "promises": "const {x} = () => Promise.resolve().then({x}); await {x}()",
    "timers": "const {x} = () => setTimeout({x}, 0); {x}(); await new Promise(() => {{}})",
    "array bomb": "let {x} = [{n}]; for (;;) {x} = [...{x}, ...{x}]",
    "string bomb": "let {x} = 'ab'; for (;;) {x} += {x}",
    "buffers": "const {x} = []; for (;;) {x}.push(new ArrayBuffer({n} * 1000))",
    "buffer at once": "new ArrayBuffer({n} * 1000000000)",
    "recursion": "function {x}(n) {{ return {x}(n + 1) + 1 }} {x}(0)",
    "proxy": "const {x} = new Proxy({{}}, {{ get: (t, k, r) => r[k + 1] }}); {x}.a",
    "toString": "const {x} = {{ toString: () => '' + {x} }}; '' + {x}",
    "toJSON": "({{ toJSON() {{ for (;;); }} }})",
    "toJSON nested": "const f = () => ({{ toJSON: () => [f()] }}); f()",
    "deep value": "let {x} = []; for (let i = 0; i < {n} * 1000; i++) {x} = [{x}]; {x}",
    "deep code": "(" * 3000 + "1" + ")" * 3000,
    "eval": "let s = '1'; for (let i = 0; i < {n} * 10; i++) s = 'eval(' + JSON.stringify(s).slice(0, 9000) + ')'; eval(s)",
    "regular expression": "/(a+)+$/.test('a'.repeat(40) + 'b')",
    "backtracking": "/(?:(?:a*)*)*b/.test('a'.repeat({n} * 1000))",
    "catch all": "for (;;) try {{ for (;;); }} catch {{}}",
    "catch stack": "const f = () => {{ try {{ f() }} catch {{ f() }} }}; f()",
    "flood": "for (;;) console.log('x'.repeat({n} * 100))",
    "big result": "Array({n} * 10000).fill('x'.repeat(1000))",
    "big file": "for (let i = 1; ; i++) writeFile('f', 'x'.repeat(i * 100000))",
    "imports": "const m = await import('qjs:std'); m.exit({n})",
    "os": "const m = await import('qjs:os'); m.exec ? m.exec(['id']) : m.open('/etc/passwd', 0)",
    "no globals": "for (const k of Object.getOwnPropertyNames(globalThis)) delete globalThis[k]; {n}",
    "broken prototypes": "Object.prototype.toJSON = () => 1; Array.prototype.map = null; String.prototype.replace = null;"
    " Map.prototype.set = null; {n}",
    "sort": "Array.from({{ length: 1e6 }}, (_, i) => i).sort(() => Math.random() - 0.5)",
    "bigint": "let {x} = 3n; for (;;) {x} = {x} * {x}",
    "unicode": "'\\ud800'.repeat({n})",
    "thrown": "throw {{ get message() {{ for (;;); }} }}",
    "thrown proxy": "throw new Proxy(new Error('x'), {{ get() {{ throw 1 }} }})",
    "long": "let {x} = 0;" + "{x}++;" * 5000 + "{x}",
    "atomics": "Atomics.wait(new Int32Array(new SharedArrayBuffer(8)), 0, 0)",
}
_OF = {
    "micropython": _PYTHON | _MICROPYTHON,
    "cpython": _PYTHON | _CPYTHON,
    "quickjs": _JAVASCRIPT,
}


def names(runtime: str) -> list[str]:
    """Of the kinds of scripts there are."""
    return sorted(_OF[runtime])


def script(runtime: str, name: str, number: int) -> Script:
    """One of that kind; the number makes it another one."""
    draw = random.Random(f"{runtime} {name} {number}")
    code = _OF[runtime][name]
    for key, value in (("x", draw.choice(["x", "data", "self", "q1"])), ("n", str(draw.randint(1, 50)))):
        code = code.replace("{" + key + "}", value)
    code = code.replace("{{", "{").replace("}}", "}")
    # work of another kind before it, or text after it that is never reached
    before = draw.choice(["", "", "pad = 'x' * 1000\n" if runtime != "quickjs" else "var pad = 'x'.repeat(1000);\n"])
    return Script(runtime, before + code, _ANY)
