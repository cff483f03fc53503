"""How long work says where it is."""

from collections.abc import Callable

#: Called now and then, from any thread, with what is being done, how much of it is done, and of how much (0: nobody
#: knows).
Progress = Callable[[str, int, int], None]


def no_progress(what: str, done: int, total: int) -> None:
    """For those who do not want to know."""
