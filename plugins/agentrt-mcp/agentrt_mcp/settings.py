"""Settings of the plugin: ``[plugins.mcp]``."""

import re
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

#: What begins so is the name of a secret.
SECRET_PREFIX = "secret://"
#: The plugin's own tool is called ``mcp.tools``.
RESERVED = "mcp"

_NAME = re.compile(r"[a-z][a-z0-9_-]{0,31}")

Kind = Literal["pure", "keyed", "at_most_once"]


class ServerSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An MCP server: a program (``command``) or an address (``url``)."""

    command: Annotated[
        tuple[str, ...],
        Meta(
            description="The program, an absolute path or a name in /usr/local/bin, /usr/bin or /bin, and its "
            "arguments. It is spoken to over its standard input and output."
        ),
    ] = ()
    url: Annotated[str, Meta(pattern=r"^(https?://.+)?$", description="Its address, for streamable HTTP.")] = ""
    environment: Annotated[
        dict[str, str], Meta(description="Its environment; secret://NAME stands for a value. Only with command.")
    ] = {}
    headers: Annotated[
        dict[str, str], Meta(description="Sent with each request; secret://NAME stands for a value. Only with url.")
    ] = {}
    network: Annotated[bool, Meta(description="Whether the program may use the node's network.")] = False
    read: Annotated[tuple[str, ...], Meta(description="Paths that the program may read and execute.")] = ()
    write: Annotated[tuple[str, ...], Meta(description="Paths that the program may change.")] = ()
    memory_bytes_max: Annotated[int, Meta(ge=0, description="Its memory. 0: process.memory_max_bytes.")] = 0
    processes_max: Annotated[
        int, Meta(ge=0, le=100_000, description="Processes and threads it may have. 0: process.pids_max.")
    ] = 0
    uid: Annotated[
        int,
        Meta(
            ge=0,
            lt=2**32 - 1,
            description="As whom the program runs if the node is root, for one that keeps files. 0: each process is a "
            "user of its own, of whose files the next one is not the owner.",
        ),
    ] = 0
    shared: Annotated[
        bool,
        Meta(
            description="All tenants share one session, and the node's secrets. Otherwise each tenant has a process or "
            "session of its own, with its own secrets."
        ),
    ] = False
    trust_hints: Annotated[
        bool,
        Meta(description="Whether its readOnlyHint and idempotentHint are believed; both then mean keyed."),
    ] = False
    kinds: Annotated[
        dict[str, Kind], Meta(description="Kinds by tool, whatever the server hints. Without both: at_most_once.")
    ] = {}
    tools: Annotated[tuple[str, ...], Meta(description="Only these of its tools; empty: all.")] = ()
    cls: Annotated[str, Meta(description="The class of its tools.")] = "tool"
    timeout_s: Annotated[float, Meta(gt=0, le=86_400, description="Of one call, while its process is not frozen.")] = 30
    key_ttl_s: Annotated[
        float, Meta(gt=0, le=316_224_000, description="For how long calls of keyed tools may be repeated.")
    ] = 86_400
    secrets: Annotated[
        tuple[str, ...], Meta(description="Secrets that arguments of its tools may refer to, as secret://NAME.")
    ] = ()
    calls_max: Annotated[int, Meta(ge=1, le=10_000, description="Calls under way at once.")] = 32
    sessions_max: Annotated[int, Meta(ge=1, le=1_000, description="Processes or sessions at once.")] = 16
    start_timeout_s: Annotated[
        float, Meta(gt=0, le=600, description="To start and shake hands. The node waits so long for its tools.")
    ] = 30
    idle_timeout_s: Annotated[float, Meta(gt=0, description="A session without a call ends after so long.")] = 300
    handshake: Annotated[
        Literal["auto", "initialize"],
        Meta(description="auto asks for the protocol of 2026 first; initialize does not."),
    ] = "auto"

    def __post_init__(self) -> None:
        if bool(self.command) is bool(self.url):
            raise ValueError("a server has a command or a url")
        if self.url and (self.environment or self.read or self.write or self.network or self.uid):
            raise ValueError("environment, read, write, network and uid are for servers with a command")
        if self.command and self.headers:
            raise ValueError("headers are for servers with a url")


class McpSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Tools of MCP servers. ``tools.providers = "mcp"`` puts it in force."""

    servers: Annotated[
        dict[str, ServerSettings], Meta(description="By name; the tool git_log of git is called git.git_log.")
    ] = {}
    catalog_path: Annotated[
        str,
        Meta(
            description="Where it is kept what the servers have offered, so that runs find their tools after a restart "
            "with a server that is away. Empty: the folder mcp beside the store, if that is on disk."
        ),
    ] = ""

    def __post_init__(self) -> None:
        for name in self.servers:
            if not _NAME.fullmatch(name) or name == RESERVED:
                raise ValueError(f"{name!r} is no name for a server: a-z, 0-9, _ and -, a letter first, and not mcp")
