"""What reading bytes of others may raise, whatever the bytes."""

from typing import Final

import msgspec

#: By a msgspec decoder. RecursionError: nested deeper than the interpreter's stack, which a few kilobytes can be.
UNREADABLE: Final = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
