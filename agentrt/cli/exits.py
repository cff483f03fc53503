"""Exit codes of the command line; docs/cli.md shows this table, tests hold the commands to it."""

from collections.abc import Iterator
from typing import Final, NamedTuple

from agentrt import errors


class ExitCode(NamedTuple):
    code: int
    name: str
    meaning: str


OK: Final = ExitCode(0, "ok", "Done; for `run`: the run SUCCEEDED; for `doctor`: nothing is refused.")
FAILED: Final = ExitCode(
    1,
    "failed",
    "The run ended otherwise; `doctor` found something refused, `store verify` damage; `demo` lost or doubled work.",
)
USAGE: Final = ExitCode(2, "usage", "Wrong options or arguments; nothing was done.")
CONFIG: Final = ExitCode(3, "config", "A setting or a plugin is wrong; nothing was started.")
INPUT: Final = ExitCode(4, "input", "Not acceptable: a bad module or JSON, an unknown run, agent or tool.")
STORE: Final = ExitCode(5, "store", "The store is in use, full, corrupt, of a newer version, or in a wrong place.")
ENGINE: Final = ExitCode(6, "engine", "The wasm engine cannot be loaded or is of another version.")
BUSY: Final = ExitCode(7, "busy", "A queue is full or the node is closing; nothing was accepted, try again later.")
UNREACHABLE: Final = ExitCode(8, "unreachable", "The node cannot be reached; nobody knows what it did meanwhile.")
REFUSED: Final = ExitCode(9, "refused", "The node does not know the API key, or the key may not do that.")
INTERNAL: Final = ExitCode(70, "internal", "agentrt has a bug; please report it with the traceback.")
INTERRUPTED: Final = ExitCode(130, "interrupted", "Stopped by Ctrl-C; with `--store` an accepted run goes on later.")

CODES: Final = (OK, FAILED, USAGE, CONFIG, INPUT, STORE, ENGINE, BUSY, UNREACHABLE, REFUSED, INTERNAL, INTERRUPTED)

_BY_ERROR: Final[tuple[tuple[type[errors.AgentrtError], ExitCode], ...]] = (
    (errors.ConfigError, CONFIG),
    (errors.PluginError, CONFIG),
    (errors.InputError, INPUT),
    (errors.DeniedError, INPUT),
    (errors.RateTooLargeError, INPUT),
    (errors.StoreError, STORE),
    (errors.EngineError, ENGINE),
    (errors.QueueFullError, BUSY),
    (errors.BreakerOpenError, BUSY),
    (errors.ClosedError, BUSY),
    (errors.UnreachableError, UNREACHABLE),
    (errors.UnauthorizedError, REFUSED),
    (errors.ForbiddenError, REFUSED),
    (errors.RunError, FAILED),
    (errors.ToolError, FAILED),
    (errors.ModelError, FAILED),
    (errors.InternalError, INTERNAL),
)


def exit_code_of(error: errors.AgentrtError) -> ExitCode:
    """The exit code that an error gives."""
    return next((code for kind, code in _BY_ERROR if isinstance(error, kind)), INTERNAL)


def error_codes() -> Iterator[tuple[str, ExitCode]]:
    """(``code`` of the error, exit code) for every error there is, sorted by code."""
    for name, kind in errors.errors_by_code().items():
        if kind is not errors.AgentrtError:
            yield name, next((code for parent, code in _BY_ERROR if issubclass(kind, parent)), INTERNAL)
