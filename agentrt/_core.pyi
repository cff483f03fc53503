"""Types of the Cython extension pyx/_core.pyx."""

from typing import Any

from typing_extensions import Buffer

from agentrt.backends.base import Request

def abi_version() -> int: ...
def engine_version() -> str: ...
def compile_module(engine_lib: str, wasm: bytes, *, any_cpu: bool = False, **limits: int) -> bytes: ...

class Module:
    @property
    def unwinds(self) -> bool: ...
    @property
    def captures(self) -> bool: ...
    @property
    def captures_anywhere(self) -> bool: ...
    def warm(self, count: int = 1) -> int: ...
    def image(self, digest: bytes) -> FrameImage: ...
    @property
    def is_agent(self) -> bool: ...

class WasiImage:
    def __init__(self, args: list[bytes], env: list[bytes], files: list[tuple[bytes, bytes]]) -> None: ...

class Guest:
    owner: Any
    scheduler_state: str | None
    ran_ns: int
    fuel_used: int
    memory_bytes: int
    def complete(self, handle: int, status: int, payload: bytes, clock_ns: int, seq: int) -> None: ...
    def go_live(self) -> None: ...
    def grant(self, fuel: int, final: bool) -> None: ...
    def lend(self, tier: int | None) -> bool: ...
    def unwind(self, reason: str, skipped: int = 0, unwind_ns: int = 200_000_000) -> None: ...
    def kill(self) -> None: ...
    def fail(self) -> None: ...
    def want_safe_point(self) -> None: ...
    def leave_safe_point(self, again: bool = False) -> None: ...
    def capture(
        self,
        to: FrameEncoder,
        *,
        module: bytes,
        id: bytes,
        segment: int,
        seq: int,
        image: FrameImage | None = None,
        base: Frame | None = None,
        keep: bool = True,
    ) -> int: ...

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
    def load(self, artifact: bytes, entry: bytes | None = None, begin: bytes | None = None) -> Module: ...
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
        frame: Frame | None = None,
        frame_base: Frame | None = None,
        frame_image: FrameImage | None = None,
        safe_point: bool = False,
        memory_bytes_max: int = 0,
        boot: str | None = None,
        stays: bool = False,
    ) -> Guest: ...
    def submit_foreign(self, owner: object, pidfd: int, *, tenant: int, tier: int) -> Foreign: ...
    def drain(self, max: int = 256) -> list[tuple[Any, str, list[Request], Any]]: ...
    def statistics(self) -> dict[str, Any]: ...
    def close(self) -> None: ...

class FrameImage:
    digest: bytes
    memory: bytes
    def __init__(self, digest: bytes, memory: bytes) -> None: ...

class Frame:
    def __init__(self, data: Buffer, *, memory_bytes_max: int) -> None: ...
    @property
    def abi(self) -> int: ...
    @property
    def module(self) -> bytes: ...
    @property
    def image(self) -> bytes: ...
    @property
    def engine(self) -> str: ...
    @property
    def id(self) -> bytes: ...
    @property
    def segment(self) -> int: ...
    @property
    def seq(self) -> int: ...
    @property
    def fuel(self) -> int: ...
    @property
    def clock_ns(self) -> int: ...
    @property
    def memory_bytes(self) -> int: ...
    @property
    def base_id(self) -> bytes | None: ...
    @property
    def check(self) -> int: ...
    @property
    def pages(self) -> dict[str, int]: ...
    @property
    def sections(self) -> dict[int, bytes]: ...
    @property
    def next_handle(self) -> int: ...
    def page_kinds(self) -> bytes: ...
    def is_base_of(self, frame: Frame) -> bool: ...
    def memory(self, *, image: FrameImage | None = None, base: Frame | None = None) -> bytes: ...

class FrameEncoder:
    def __len__(self) -> int: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...
    def encode(
        self,
        memory: Buffer,
        *,
        module: bytes,
        engine: str,
        id: bytes,
        segment: int,
        seq: int,
        fuel: int,
        clock_ns: int,
        sections: dict[int, bytes],
        image: FrameImage | None = None,
        base: Frame | None = None,
        abi: int = 1,
    ) -> int: ...

def crc32c(data: bytes, crc: int = 0, plain: bool = False) -> int: ...

PAGE_KINDS: tuple[str, ...]

def module_facts(
    wasm: bytes, loop_export: bytes | None = None, *, copied: list[int] | None = None, copies_first: int = 0
) -> tuple[bytes, dict[str, Any]]: ...

FRAME_SECTIONS: dict[str, int]
BOOTS: dict[str, int]
BOOT_SEEN: dict[str, int]
