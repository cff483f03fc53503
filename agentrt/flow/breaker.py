"""Breakers: what fails again and again is left alone for a while, per provider, tool, and (caller, target agent).

    CLOSED --(failures in a row, or a share of the last ones)--> OPEN --(time)--> HALF_OPEN: one probe
    HALF_OPEN --probe succeeds--> CLOSED          HALF_OPEN --probe fails--> OPEN, for twice as long, up to a bound

Each change of state begins an epoch; a call carries the epoch it began in and its result counts only there: stragglers
from before neither close nor open anything. A failure is what says that the other side does not work (transport,
time-outs); that it refuses (429, conflicts, bad requests) shows that it does.
"""

from enum import IntEnum
from typing import Final

import msgspec

from agentrt.errors import ConfigError

_S: Final = 10**9


class BreakerState(IntEnum):
    CLOSED = 0
    OPEN = 1
    HALF_OPEN = 2


class BreakerLimits(msgspec.Struct, frozen=True):
    """Opens after ``in_row`` failures in a row, or when ``share_pct`` of at least half of the last ``last`` calls have
    failed; stays open for ``open_ns``, doubling up to ``open_max_ns``."""

    in_row: int = 5
    share_pct: int = 50
    last: int = 20
    open_ns: int = 5 * _S
    open_max_ns: int = 300 * _S

    def __post_init__(self) -> None:
        if not (
            1 <= self.in_row <= self.last <= 1000
            and 1 <= self.share_pct <= 100
            and 0 < self.open_ns <= self.open_max_ns
        ):
            raise ConfigError(
                f"a breaker of {self.in_row} in a row, {self.share_pct} % of {self.last}",
                hint="1 <= in_row <= last <= 1000, share_pct 1 to 100, 0 < open_ns <= open_max_ns",
            )


class Breaker:
    """One breaker. Times are ns of the caller's clock."""

    __slots__ = ("_bits", "_mask", "_probing", "_row", "_seen", "_times", "epoch", "limits", "state", "until_ns")

    def __init__(self, limits: BreakerLimits | None = None) -> None:
        limits = self.limits = BreakerLimits() if limits is None else limits
        self._row = (1 << limits.in_row) - 1
        self._mask = (1 << limits.last) - 1
        self.state = BreakerState.CLOSED
        self.epoch = 0
        self.until_ns = 0  # OPEN: until then
        self._times = 0  # opened in a row, without a success between
        self._bits = self._seen = 0  # of the last calls: 1 is a failure
        self._probing = False

    @property
    def settled(self) -> bool:
        """Closed, with as many successes behind it as it looks at: one more changes nothing."""
        return not self._bits and self._seen == self.limits.last and self.state is BreakerState.CLOSED

    def admits(self, now_ns: int) -> bool:
        """Whether a call may begin now; `enter` follows if it does."""
        if self.state is BreakerState.CLOSED:
            return True
        return not self._probing if self.state is BreakerState.HALF_OPEN else now_ns >= self.until_ns

    def enter(self, now_ns: int) -> int:
        """A call that `admits` has allowed begins: the epoch that it carries."""
        if self.state is not BreakerState.CLOSED:
            if self.state is BreakerState.OPEN:
                self.state = BreakerState.HALF_OPEN
                self.epoch += 1
            self._probing = True
        return self.epoch

    def leave(self, epoch: int) -> None:
        """A call ended without saying anything about the other side (it was cancelled, or refused for its rate)."""
        if epoch == self.epoch:
            self._probing = False

    def record(self, epoch: int, failed: bool, now_ns: int) -> BreakerState | None:
        """A call that began in ``epoch`` has ended. The state if this changed it."""
        if epoch != self.epoch:
            return None
        if self.state is BreakerState.HALF_OPEN:
            self._probing = False
            if failed:
                return self._open(now_ns)
            self.state = BreakerState.CLOSED
            self.epoch += 1
            self._bits = self._seen = self._times = 0
            return self.state
        self._bits = (self._bits << 1 | failed) & self._mask
        if self._seen < self.limits.last:
            self._seen += 1
        if failed and (self._bits & self._row == self._row or self._too_many()):
            return self._open(now_ns)
        return None

    def _too_many(self) -> bool:
        limits = self.limits
        return 2 * self._seen >= limits.last and 100 * self._bits.bit_count() >= limits.share_pct * self._seen

    def _open(self, now_ns: int) -> BreakerState:
        self.state = BreakerState.OPEN
        self.epoch += 1
        self.until_ns = now_ns + min(self.limits.open_max_ns, self.limits.open_ns << min(self._times, 32))
        self._times += 1
        self._bits = self._seen = 0
        self._probing = False
        return self.state

    def shift(self, delta_ns: int) -> None:
        """The clock was set; negative: back."""
        self.until_ns += delta_ns

    @property
    def snapshot(self) -> tuple[int, int]:
        """All there is to keep over a restart: (until_ns, times opened in a row); (0, 0) if it is closed."""
        return (0, 0) if self.state is BreakerState.CLOSED else (self.until_ns, self._times)

    def restore(self, until_ns: int, times: int, now_ns: int) -> None:
        """Go on from a snapshot: open until then, and no longer than it may be."""
        if times:
            self.state = BreakerState.OPEN
            self.epoch += 1
            self._times = times
            self.until_ns = min(until_ns, now_ns + self.limits.open_max_ns)
