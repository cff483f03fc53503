"""How much may be accepted and not ended, in runs and in bytes of their inputs. Full means that the caller sees it."""

from typing import Final

from agentrt.errors import QueueFullError


class Admission:
    """Counts what is accepted and not ended. Recovered runs are counted, never refused: they were accepted before."""

    __slots__ = ("bytes", "bytes_max", "items", "items_max", "refused")

    def __init__(self, items_max: int, bytes_max: int) -> None:
        self.items_max: Final = items_max
        self.bytes_max: Final = bytes_max
        self.items = 0
        self.bytes = 0
        self.refused = 0

    def enter(self, size_bytes: int) -> None:
        """Make room for a new run. Raises QueueFullError; nothing is taken then."""
        if self.items >= self.items_max or self.bytes + size_bytes > self.bytes_max:
            self.refused += 1
            name = "queue_items_max" if self.items >= self.items_max else "queue_bytes_max"
            raise QueueFullError(
                f"{self.items} runs with {self.bytes} bytes of input are accepted and not ended",
                limit=f"scheduler.{name}",
                hint="Try again when some have ended",
            )
        self.items += 1
        self.bytes += size_bytes

    def adopt(self) -> None:
        """Count a run of the store; its input is not in memory yet."""
        self.items += 1

    def grow(self, size_bytes: int) -> None:
        """An adopted run's input came into memory; a negative size says that it went."""
        self.bytes += size_bytes

    def leave(self, size_bytes: int) -> None:
        """A run has ended, or was refused by the store."""
        self.items -= 1
        self.bytes -= size_bytes
