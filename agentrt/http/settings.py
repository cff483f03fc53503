"""Settings of the HTTP API."""

from typing import Annotated

from agentrt.errors import ConfigError
from agentrt.settings import KIB, MIB, Section, setting


class HttpConfig(Section, frozen=True, kw_only=True):
    """The HTTP API of `agentrt serve`."""

    listen: Annotated[
        str,
        setting("Address and port, as `127.0.0.1:8420` or `[::1]:8420`; port 0 picks a free one.", "address"),
    ] = "127.0.0.1:8420"
    certificate: Annotated[
        str,
        setting("TLS certificate with its chain, a PEM file. Empty: no TLS, for loopback or behind a proxy.", "path"),
    ] = ""
    private_key: Annotated[str, setting("Its private key, a PEM file.", "path")] = ""
    connections_max: Annotated[
        int,
        setting("Connections at once; more are answered 503 and closed.", "connections", 1, 1_000_000),
    ] = 4_096
    head_bytes_max: Annotated[int, setting("Request line and headers of one request.", "bytes", KIB, 16 * MIB)] = (
        32 * KIB
    )
    head_timeout_ms: Annotated[
        int, setting("How long they may take to arrive, from the first byte or from connecting.", "ms", 100, 600_000)
    ] = 10_000
    body_bytes_max: Annotated[int, setting("Body of one request.", "bytes", KIB, 64 * MIB)] = 2 * MIB
    body_timeout_ms: Annotated[int, setting("How long it may take to arrive.", "ms", 100, 3_600_000)] = 30_000
    write_timeout_ms: Annotated[
        int, setting("How long a client may leave an answer or a stream lying before it is cut.", "ms", 100, 3_600_000)
    ] = 30_000
    streams_max: Annotated[int, setting("Streams of events at once, of all tenants.", "streams", 1, 1_000_000)] = 2_000
    streams_per_tenant_max: Annotated[
        int, setting("Streams of events at once of one tenant.", "streams", 1, 1_000_000)
    ] = 500
    callback_networks: Annotated[
        tuple[str, ...],
        setting(
            "Networks to which callbacks (`callback_url`) may go beside public addresses, there also without TLS, as "
            "`10.1.0.0/16` or `fd00::/8`.",
            "networks",
        ),
    ] = ()
    heartbeat_max_ms: Annotated[
        int,
        setting(
            "Age of the control loop's last sign of life above which `/healthz` answers 503 and systemd's watchdog is "
            "no longer told that the node lives.",
            "ms",
            100,
            3_600_000,
        ),
    ] = 10_000
    stop_timeout_ms: Annotated[int, setting("How long stopping waits for answers under way.", "ms", 0, 3_600_000)] = (
        5_000
    )


def parse_address(text: str) -> tuple[str, int]:
    """Host and port of ``127.0.0.1:8420`` or ``[::1]:8420``. Raises ConfigError."""
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isdecimal() or int(port) > 65_535:
        raise ConfigError(f"http.listen: {text!r:.200} is no address", hint="Write 127.0.0.1:8420 or [::1]:8420")
    return host.removeprefix("[").removesuffix("]"), int(port)
