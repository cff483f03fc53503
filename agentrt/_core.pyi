"""Types of the Cython extension pyx/_core.pyx."""

from typing import Any

from agentrt.backends.base import Request

def abi_version() -> int: ...
def engine_version() -> str: ...
def compile_module(engine_lib: str, wasm: bytes, **limits: int) -> bytes: ...

class Module:
    @property
    def unwinds(self) -> bool: ...
    @property
    def is_agent(self) -> bool: ...

class WasiImage:
    def __init__(self, args: list[bytes], env: list[bytes], files: list[tuple[bytes, bytes]]) -> None: ...

class Guest:
    owner: Any
    scheduler_state: str | None
    ran_ns: int
    def complete(self, handle: int, status: int, payload: bytes, clock_ns: int, seq: int) -> None: ...
    def go_live(self) -> None: ...
    def grant(self, fuel: int, final: bool) -> None: ...
    def lend(self, tier: int | None) -> bool: ...
    def unwind(self, reason: str, unwind_ns: int = 200_000_000) -> None: ...
    def kill(self) -> None: ...

class Foreign:
    owner: Any
    def lend(self, tier: int | None) -> bool: ...
    def release(self) -> bool: ...

class Core:
    closed: bool
    def __init__(
        self,
        *,
        engine_lib: str,
        workers: int,
        micro_slice_fuel: int,
        quantum_ns: tuple[int, int, int, int],
        guests_max: int,
        stacks_max: int,
        memory_bytes_max: int,
        wasm_stack_bytes: int,
        table_elements_max: int,
        request_bytes_max: int,
        result_bytes_max: int,
        inflight_max: int,
        queue_items_max: int,
        queue_bytes_max: int,
        aging_threshold: int,
        aging_wait_ns: tuple[int, int, int, int],
        tier0_share_pct: int,
        tenants_max: int,
        base_tier_ops: int,
        nice: int,
        pin: bool,
    ) -> None: ...
    @property
    def fd(self) -> int: ...
    def artifact_key(self) -> bytes: ...
    def load(self, artifact: bytes, entry: bytes | None = None) -> Module: ...
    def tenant(self, index: int, weight: int) -> None: ...
    def submit(
        self,
        module: Module,
        owner: object,
        tenant: int,
        tier: int,
        input: bytes,
        restored: bytes | None,
        fuel: int,
        seed: bytes,
        clock_ns: int,
        admitted: bool,
        replay: bool,
        fuel_final: bool = True,
        wasi: WasiImage | None = None,
    ) -> Guest: ...
    def submit_foreign(self, owner: object, pidfd: int, *, tenant: int, tier: int) -> Foreign: ...
    def drain(self, max: int = 256) -> list[tuple[Any, str, list[Request], Any]]: ...
    def statistics(self) -> dict[str, Any]: ...
    def close(self) -> None: ...
