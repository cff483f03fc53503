"""The engine's self-test, run as a child: ``python -m agentrt.doctor.selftest LIBRARY``.

Prints one JSON line ``{"ok": bool, "why": str}``. Three guests: one returns, one reads out of bounds (the engine's
signal handlers turn that into a trap), one never yields and is killed.
"""

import json
import select
import sys
from typing import Any, Final

#: (module (memory (export "memory") 1) (func (export "agentrt_run") (result i32) BODY))
_HEAD: Final = b"\0asm\1\0\0\0\1\5\1\x60\0\1\x7f\3\2\1\0\5\3\1\0\1\7\x18\2\6memory\2\0\x0bagentrt_run\0\0"
RETURNS: Final = b"\x41\0\x0b"  # i32.const 0
FAULTS: Final = b"\x41\x7f\x28\2\0\x0b"  # i32.const -1, i32.load
LOOPS: Final = b"\3\x40\x0c\0\x0b\0\x0b"  # loop br 0 end, unreachable

EVENT_TIMEOUT_MS: Final = 20_000


def module(body: bytes) -> bytes:
    """A module whose entry has this body."""
    function = b"\0" + body
    code = b"\1" + bytes([len(function)]) + function
    return _HEAD + b"\x0a" + bytes([len(code)]) + code


def main(library: str) -> dict[str, Any]:
    """Run the guests; says what was wrong first."""
    from agentrt._core import Core, compile_module
    from agentrt.config import Config, SchedulerConfig, WasmConfig
    from agentrt.sizing import core_parameters, engine_limits

    config = Config(
        scheduler=SchedulerConfig(workers=1),
        wasm=WasmConfig(engine_lib=library, guests_max=8, stacks_max=8, memory_bytes_max=1 << 20),
    )
    parameters = core_parameters(config)
    core = Core(**parameters)
    try:
        poller = select.poll()
        poller.register(core.fd, select.POLLIN)
        for name, body, expected in (
            ("returns", RETURNS, "returned"),
            ("faults", FAULTS, "trap"),
            ("loops", LOOPS, "killed"),
        ):
            artifact = compile_module(library, module(body), **engine_limits(parameters))
            guest = core.submit(
                core.load(artifact),
                name,
                tenant=0,
                tier=1,
                input=b"null",
                restored=None,
                fuel=10**15,
                seed=bytes(16),
                clock_ns=0,
                admitted=False,
                replay=False,
            )
            if name == "loops":
                guest.kill()
            reason = _exit_reason(core, poller)
            if reason != expected:
                return {"ok": False, "why": f"a guest that {name} ended with {reason!r}, not {expected!r}"}
    finally:
        core.close()
    return {"ok": True, "why": ""}


def _exit_reason(core: Any, poller: "select.poll") -> str:
    while poller.poll(EVENT_TIMEOUT_MS):
        for _owner, kind, _requests, detail in core.drain():
            if kind == "exit":
                return str(detail[0])
    return "no event"


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1])))
