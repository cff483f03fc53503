"""Which runs of a store are like what somebody looks for, a page at a time. Blocks: for a thread that reads."""

from typing import Final, NamedTuple, Protocol

from agentrt.engine.info import RunInfo
from agentrt.stores.base import Head

_SCANNED_AT_ONCE: Final = 1_000
#: Runs that one page looks at: a search for what there is not costs no more than some 50 ms of one core.
SCANNED_MAX: Final = 20_000


class Heads(Protocol):
    """A store, or a reader of one."""

    def scan_heads(
        self, after: str = "", limit: int = 1000, newest_first: bool = False, tenant: str | None = None
    ) -> list[Head]: ...


class Wanted(NamedTuple):
    """What runs are looked for; None: whatever it is. ``text``, in small letters, is in the id, the agent's name, the
    state or what the run waits for. Those of a tenant are found without a look at others'."""

    state: str | None = None
    tenant: str | None = None
    agent: str | None = None
    text: str | None = None

    @property
    def picky(self) -> bool:
        """Whether a run of the tenant may not be wanted."""
        return not (self.state is None and self.agent is None and self.text is None)

    def fits(self, head: Head) -> bool:
        """Whether it is one, being the tenant's."""
        return (
            (self.state is None or head.state == self.state)
            and (self.agent is None or head.agent == self.agent)
            and (
                self.text is None
                or self.text in f"{head.run_id} {head.agent} {head.state} {head.wait_reason or ''}".lower()
            )
        )


class HeadPage(NamedTuple):
    """``next``: what to go on after, None behind the last run. A page may be short, or empty, and not the last."""

    heads: list[Head]
    next: str | None


class RunsPage(NamedTuple):
    """As `HeadPage`."""

    runs: list[RunInfo]
    next: str | None


def find_heads(store: Heads, wanted: Wanted, after: str, limit: int, newest_first: bool = False) -> HeadPage:
    """The first ``limit`` of the runs after ``after``, among the first `SCANNED_MAX`."""
    found: list[Head] = []
    for _ in range(SCANNED_MAX // _SCANNED_AT_ONCE):
        # Nobody pays for heads that are not shown.
        at_once = _SCANNED_AT_ONCE if wanted.picky else min(_SCANNED_AT_ONCE, limit - len(found))
        heads = store.scan_heads(after, at_once, newest_first, wanted.tenant)
        for head in heads:
            if wanted.fits(head):
                found.append(head)
                if len(found) == limit:
                    return HeadPage(found, head.run_id)
        if len(heads) < at_once:
            return HeadPage(found, None)
        after = heads[-1].run_id
    return HeadPage(found, after)
