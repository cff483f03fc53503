# Runs in the guest, MicroPython or CPython: executes the code that stdin holds and writes what became of it to
# /dev/result. Nothing here is protected from that code; whatever it makes of it, the node reads with suspicion.
import builtins
import io
import json
import sys
from binascii import b2a_base64

MICRO = sys.implementation.name == "micropython"
if MICRO:
    import gc

    gc.disable()  # its collector frees what only wasm locals hold, here too
    RESERVE = io.BytesIO(32768)  # freed by closing it, to tell that there is no memory
else:
    import _ast  # not ast, which takes long to import
    import os

    if os.environ.get("AGENTRT_PRELOAD"):  # for an image; not random, which is not the same for all
        # several tuples: MicroPython compiles this, too
        for names in (
            ("ast", "base64", "bisect", "collections", "copy", "csv", "dataclasses", "datetime", "enum", "functools"),
            ("hashlib", "heapq", "html", "itertools", "math", "operator", "pathlib", "re", "string", "struct"),
            ("textwrap", "traceback", "typing", "zlib"),
        ):
            for name in names:
                try:
                    __import__(name)
                except ImportError:
                    pass

NAME = "<code>"
TEXT_MAX = 4000
DEPTH_MAX = 60
real_open = builtins.open
written = {}  # path -> str or bytes
opened = []


def path_of(path):
    if not isinstance(path, str):
        path = os.fspath(path)
    while path[:2] == "./":
        path = path[2:]
    return path.lstrip("/")


def keep(file):
    if file in opened:
        written[file.agentrt_path] = file.getvalue()


if MICRO:

    class Text(io.IOBase):
        def __init__(self, path, value):
            self.agentrt_path = path
            self.io = self.make()
            self.io.write(value)

        def make(self):
            return io.StringIO()

        def write(self, data):
            if not isinstance(data, str):
                data = str(data, "utf-8")
            return self.io.write(data)

        def getvalue(self):
            return self.io.getvalue()

        def close(self):
            keep(self)

        def flush(self):
            keep(self)

        def __enter__(self):
            return self

        def __exit__(self, *error):
            keep(self)

        def __iter__(self):
            return iter(self.io)

        def __getattr__(self, name):
            return getattr(self.io, name)

    class Binary(Text):
        def make(self):
            return io.BytesIO()

        def write(self, data):
            return self.io.write(data)

else:

    class Text(io.StringIO):
        def __init__(self, path, value):
            super().__init__(newline="")
            self.agentrt_path = path
            self.write(value)

        def close(self):
            if not self.closed:
                keep(self)
            super().close()

        def flush(self):
            keep(self)

    class Binary(io.BytesIO):
        def __init__(self, path, value):
            super().__init__()
            self.agentrt_path = path
            self.write(value)

        flush = Text.flush

        def close(self):
            if not self.closed:
                keep(self)
            super().close()


def open_file(path, mode="r", *more, **options):
    if isinstance(path, int):
        return real_open(path, mode, *more, **options)
    name, binary = path_of(path), "b" in mode
    if "r" in mode and "+" not in mode:
        if name not in written:
            return real_open(path, mode, *more, **options)
        value = written[name]
        if binary:
            return io.BytesIO(value if isinstance(value, bytes) else value.encode())
        return io.StringIO(value if isinstance(value, str) else value.decode())
    value = b"" if binary else ""
    if "w" not in mode:  # a, x, r+
        try:
            with open_file(path, "rb" if binary else "r") as before:
                value = before.read()
        except OSError:
            if "r" in mode:
                raise
        else:
            if "x" in mode:
                raise OSError(17, "File exists: " + name)
    file = (Binary if binary else Text)(name, value)
    opened.append(file)
    keep(file)
    if "r" in mode:
        file.seek(0)
    return file


def parts(code):
    """What to execute, and the expression at its end, if there is one."""
    if not MICRO:
        tree = compile(code, NAME, "exec", _ast.PyCF_ONLY_AST)
        if tree.body and isinstance(tree.body[-1], _ast.Expr):
            last = _ast.Expression(tree.body.pop().value)
            return compile(tree, NAME, "exec"), compile(last, NAME, "eval")
        return compile(tree, NAME, "exec"), None
    lines = code.split("\n")
    tries = 0
    for at in range(len(lines) - 1, -1, -1):
        if lines[at] and lines[at][0] not in " \t\r)]}#":
            try:
                last = compile("(" + "\n" * at + "\n".join(lines[at:]) + "\n)", NAME, "eval")
                # a whole program before a whole expression: together they are what they are apart
                return (compile("\n".join(lines[:at]), NAME, "exec") if at else None), last
            except SyntaxError:
                tries += 1
                if tries == 20:
                    break
    return compile(code, NAME, "exec"), None


def is_json(value, depth=0):
    if value is None or isinstance(value, (bool, str)):
        return True
    if isinstance(value, int):
        return -(2**63) <= value < 2**64
    if isinstance(value, float):
        return value - value == 0
    if depth == DEPTH_MAX:
        return False
    if isinstance(value, (list, tuple)):
        return all(is_json(item, depth + 1) for item in value)
    if isinstance(value, dict):
        return all(isinstance(key, str) and is_json(item, depth + 1) for key, item in value.items())
    return False


def shown(value):
    try:
        text = repr(value)
    except Exception:
        text = "<" + type(value).__name__ + ">"
    return text[:TEXT_MAX]


def error_of(error):
    kind, name = "raised", type(error).__name__
    try:
        message = str(error)
    except Exception:
        message = ""
    if isinstance(error, SystemExit):
        kind = "exited"
    elif isinstance(error, SyntaxError):
        kind = "syntax"
    elif isinstance(error, MemoryError):
        kind = "memory"
    elif name == "RecursionError" or (MICRO and "recursion" in message):
        kind = "stack"
    if MICRO:
        text = io.StringIO()
        sys.print_exception(error, text)
        trace = text.getvalue()
    else:
        try:
            import traceback  # as long

            trace = "".join(traceback.format_exception(type(error), error, error.__traceback__, 20))
        except BaseException:
            trace = ""
    at = trace.find('  File "' + NAME)
    return {"kind": kind, "type": name, "message": message[:TEXT_MAX], "traceback": trace[max(at, 0) :][-TEXT_MAX:]}


def write(data):
    result = real_open("/dev/result", "wb")
    at = 0
    while at < len(data):
        at += result.write(data[at : at + 65536])
    result.close()


def tell(answer):
    files = {}
    for file in opened:
        try:
            keep(file)
        except ValueError:
            pass  # closed, and kept then
    for path, value in written.items():
        files[path] = value if isinstance(value, str) else {"base64": b2a_base64(value).decode().strip()}
    if files:
        answer["files"] = files
    data = json.dumps(answer).encode()
    if len(data) > request["result_bytes"]:
        message = "value and files have " + str(len(data)) + " bytes as JSON"
        data = json.dumps({"error": {"kind": "result", "type": "", "message": message, "traceback": ""}}).encode()
    write(data)


request = json.loads(sys.stdin.read())
builtins.open = open_file
if not MICRO:
    io.open = open_file
space = {"__name__": "__main__", "__builtins__": builtins}
space.update(request["variables"])
answer, failure = {}, None
try:
    head, last = parts(request["code"])
    if head is not None:
        exec(head, space)
    value = space.get("result") if last is None else eval(last, space)
    if is_json(value):
        answer["value"] = value
    else:
        answer["repr"] = shown(value)
except BaseException as error:
    failure = error
if failure is not None:
    if isinstance(failure, SystemExit) and failure.args[:1] in ((), (None,), (0,)):
        answer = {}
    else:
        if isinstance(failure, MemoryError):
            value = head = last = None
            space.clear()
            written.clear()
            opened.clear()
            if MICRO:
                RESERVE.close()
        answer = {"error": error_of(failure)}
try:
    tell(answer)
except MemoryError:
    answer = value = space = None
    written.clear()
    if MICRO:
        RESERVE.close()
    write(b'{"error":{"kind":"memory","type":"MemoryError","message":"no memory is left for the result"}}')
if not MICRO:
    # finalising takes milliseconds, and finalisers any time
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except Exception:
            pass
    os._exit(0)
