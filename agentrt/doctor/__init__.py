"""``agentrt doctor``: what works on this machine, what is degraded, what is refused, and why.

Each check looks at the real thing (asks the kernel, times the disk, runs a guest) and answers with a `Check`. A check
that fails in an unforeseen way is reported as refused with the exception, never hidden; the others go on.
"""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from agentrt.config import Config
from agentrt.machine import Machine, read_machine

#: works: as designed. degraded: runs, with less speed, isolation or precision. refused: what needs it will not start.
State = Literal["works", "degraded", "refused"]
STATES: Final[tuple[State, ...]] = ("works", "degraded", "refused")


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """One finding. ``why`` says what is missing and what that costs, ``hint`` what to do; both empty if it works."""

    name: str
    state: State
    found: str
    why: str = ""
    hint: str = ""
    data: dict[str, Any] = {}


class Examined(msgspec.Struct, frozen=True):
    """What the checks look at."""

    config: Config
    machine: Machine
    folder: Path  # an existing folder on the file system where the store is, or will be


class Report(msgspec.Struct, frozen=True):
    checks: tuple[Check, ...]

    @property
    def state(self) -> State:
        """The worst state of any check."""
        return max((check.state for check in self.checks), key=STATES.index, default="works")

    def to_dict(self) -> dict[str, Any]:
        """``{"state": …, "checks": [{"name", "state", "found", "why", "hint", "data"}, …], "needs": [{"what", "needs",
        "without", "then", "here"}, …]}``"""
        from agentrt.doctor.needs import NEEDS

        return {
            "state": self.state,
            "checks": [msgspec.structs.asdict(check) for check in self.checks],
            "needs": [need.to_dict(self.checks) for need in NEEDS],
        }


Examiner = Callable[[Examined], Iterable[Check]]


def examine(config: Config) -> Report:
    """Run every check; takes about two seconds, most of it load of its own for the wake-up measurement."""
    from agentrt.doctor.engine import EXAMINERS as ENGINE
    from agentrt.doctor.host import EXAMINERS as HOST
    from agentrt.doctor.security import EXAMINERS as SECURITY
    from agentrt.doctor.timing import EXAMINERS as TIMING

    examined = Examined(config, read_machine(), _existing(config.store.path))
    found: list[Check] = []
    for examiner in (*HOST, *TIMING, *ENGINE, *SECURITY):
        try:
            found += examiner(examined)
        except Exception as error:
            name = examiner.__name__.removeprefix("check_").replace("_", " ")
            found.append(
                Check(
                    name=name,
                    state="refused",
                    found="the check itself failed",
                    why=f"{type(error).__name__}: {error}",
                    hint="Please report this",
                )
            )
    return Report(tuple(found))


def _existing(store_path: str) -> Path:
    """The store's folder or the nearest one above it that exists; without a store, the current folder."""
    path = Path(store_path or ".").absolute()
    while not path.is_dir():
        path = path.parent
    return path
