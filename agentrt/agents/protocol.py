"""Messages between a node and its Python hosts and templates.

A host has one Unix stream socket. Frames as with tool hosts (u32 length, one msgpack value): the node's are lists of
`ToHost`, the host's lists of `FromHost`. Every `Start`, `Complete` and `Unwind` is one activation and is answered by
one `Suspended` or `Ended`, in order; `Drop` is not answered.

A template has one Unix seqpacket socket: one msgpack value a packet, `ToTemplate` and `FromTemplate`, descriptors
beside it.

The page is shared memory between a host and the node, unsigned 64-bit words that only the host writes:
    0  activations begun (replayed records count)      1  number of the run that is executing, 0 when none is
    2  number of the run that is charged with the host's end, if it ends by itself
"""

from collections.abc import Sequence
from typing import Final

import msgspec

PAGE_BYTES: Final = 4096
PAGE_ACTIVATIONS: Final = 0
PAGE_RUN: Final = 1
PAGE_CHARGED: Final = 2

#: A host that ends because one of its runs holds most of its memory.
EXIT_MEMORY: Final = 77


class Answer(msgspec.Struct, array_like=True, frozen=True):
    """The answer to a step: its handle, agentrt.backends.base.Status, JSON, and the time of its record in Unix ns. In a
    history, handle 0 stands for `Unwind`, whose reason is the payload."""

    handle: int
    status: int
    payload: bytes
    clock_ns: int


class Start(msgspec.Struct, array_like=True, frozen=True, tag=1):
    """Begin a run, or bring it back: ``history`` is given first, record by record, and its requests are not sent again,
    only their checks."""

    number: int
    entry: str  # qualified name of the agent's function
    run_id: str
    tenant: str
    input: bytes
    restored: bytes | None
    seed: bytes
    clock_ns: int
    history: list[Answer]


class Complete(msgspec.Struct, array_like=True, frozen=True, tag=2):
    number: int
    answer: Answer


class Unwind(msgspec.Struct, array_like=True, frozen=True, tag=3):
    number: int
    reason: str


class Drop(msgspec.Struct, array_like=True, frozen=True, tag=4):
    number: int


ToHost = Start | Complete | Unwind | Drop


class Ask(msgspec.Struct, array_like=True, frozen=True):
    """A request of a run: handle (0: a log line), number of the op, JSON."""

    handle: int
    op: int
    payload: bytes


class Suspended(msgspec.Struct, array_like=True, frozen=True, tag=1):
    """The activation is over. ``checks``: CRC-32 of each request of the history, u32 little endian, in order."""

    number: int
    requests: list[Ask]
    abandoned: list[int]
    cpu_ns: int
    checks: bytes = b""


class Ended(msgspec.Struct, array_like=True, frozen=True, tag=2):
    """The activation was the last. ``reason``, ``code``, ``output``, ``message`` as in agentrt.backends.base.Exit."""

    number: int
    requests: list[Ask]
    abandoned: list[int]
    cpu_ns: int
    reason: str
    code: int
    output: bytes | None
    message: str
    checks: bytes = b""


class Ready(msgspec.Struct, array_like=True, frozen=True, tag=3):
    """The host is confined and takes runs."""

    pid: int


FromHost = Suspended | Ended | Ready


class HostLimits(msgspec.Struct, array_like=True, frozen=True):
    """Bounds inside one host."""

    request_bytes_max: int = 1 << 20
    result_bytes_max: int = 4 << 20
    memory_bytes_max: int = 512 << 20  # of data, beyond what the template has; 0: no limit
    inflight_max: int = 10_000  # unanswered steps of one run


class Prepare(msgspec.Struct, array_like=True, frozen=True, tag=1):
    """First packet to a template: import the source and become ready to fork."""

    sys_path: list[str]
    source: str  # module name or path of a file
    limits: HostLimits
    confine: bool  # False: only where the operator allowed unsandboxed hosts


class Fork(msgspec.Struct, array_like=True, frozen=True, tag=2):
    """With two descriptors: the host's end of its socket, and its page; and a third if there is a cgroup leaf that it
    has to enter: of its cgroup.procs. ``uid``: a user for it alone, 0: as the template. Answered by `Forked`."""

    ticket: int
    uid: int = 0


ToTemplate = Prepare | Fork


class AgentInfo(msgspec.Struct, array_like=True, frozen=True):
    """An agent that the source declares: what `agentrt.agents.declare.agent` was given."""

    entry: str
    name: str
    tier: int
    budget: dict[str, int | float]


class Prepared(msgspec.Struct, array_like=True, frozen=True, tag=1):
    """``digest``: sha256 over the bundle's files, hex. ``confinement``: what is in force in hosts, by name."""

    digest: str
    agents: list[AgentInfo]
    broken: dict[str, str]  # entry -> why this agent cannot be run
    confinement: dict[str, str]
    files: list[tuple[str, int, int]]  # path, mtime in ns, size: what was read


class Refused(msgspec.Struct, array_like=True, frozen=True, tag=2):
    """The source cannot be imported, or hosts not be confined."""

    kind: str  # import, sandbox
    message: str


class Forked(msgspec.Struct, array_like=True, frozen=True, tag=3):
    """With one descriptor: the child's pidfd. ``pid`` 0: it could not be forked, and no descriptor comes."""

    ticket: int
    pid: int
    message: str = ""


class Gone(msgspec.Struct, array_like=True, frozen=True, tag=4):
    """A host was reaped. ``status``: its exit status, negative: the signal."""

    pid: int
    status: int


FromTemplate = Prepared | Refused | Forked | Gone

to_host_decoder: Final = msgspec.msgpack.Decoder(list[ToHost])
from_host_decoder: Final = msgspec.msgpack.Decoder(list[FromHost])
to_template_decoder: Final = msgspec.msgpack.Decoder(ToTemplate)
from_template_decoder: Final = msgspec.msgpack.Decoder(FromTemplate)
encode_packet: Final = msgspec.msgpack.Encoder().encode

_encoder: Final = msgspec.msgpack.Encoder()


def host_frame(messages: Sequence[ToHost | FromHost]) -> bytearray:
    """Messages as one frame (agentrt.tools.protocol.FrameReader cuts them)."""
    buffer = bytearray(4)
    _encoder.encode_into(messages, buffer, 4)
    buffer[:4] = (len(buffer) - 4).to_bytes(4, "little")
    return buffer
