"""One thing at a time per key: actions of one lane follow each other, those of different lanes do not wait."""

from collections import deque
from collections.abc import Callable


class Lanes:
    """An action that was entered is called when those before it have left; each must `leave` exactly once, at once or
    later."""

    def __init__(self) -> None:
        self._lanes: dict[bytes, deque[Callable[[], None]]] = {}

    def enter(self, key: bytes, action: Callable[[], None]) -> None:
        lane = self._lanes.get(key)
        if lane is not None:
            lane.append(action)
            return
        self._lanes[key] = deque()
        action()

    def leave(self, key: bytes) -> None:
        """Whose turn it was is done."""
        lane = self._lanes[key]
        if lane:
            lane.popleft()()
        else:
            del self._lanes[key]
