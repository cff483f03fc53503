"""A run's own stream of random bytes: the same whenever it is brought back, another in each segment."""

from hashlib import blake2b


class RandomStream:
    """``seed``: of the run's segment."""

    __slots__ = ("_blocks", "seed")

    def __init__(self, seed: bytes) -> None:
        self.seed = seed
        self._blocks = 0

    def take(self, count: int) -> bytes:
        """The next bytes."""
        out = bytearray()
        while len(out) < count:
            self._blocks += 1
            out += self.block(b"bytes", self._blocks)
        return bytes(out[:count])

    def block(self, use: bytes, number: int) -> bytes:
        """64 bytes that depend on the seed and these only."""
        return blake2b(number.to_bytes(8, "little"), key=self.seed, person=use).digest()
