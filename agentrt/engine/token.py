"""Resume tokens: where a run is in its journal, and what its place in the queue carries.

As text: ``run/segment/seq/frame/fuel/tier``, the frame ``-`` if there is none.
"""

import re
from typing import Final, NamedTuple

from agentrt.errors import InputError

_NUMBER: Final = "(0|[1-9][0-9]{0,18})"
_RUN: Final = "(run_[0-7][0-9A-HJKMNP-TV-Z]{25})"
_TEXT: Final = re.compile(rf"{_RUN}/{_NUMBER}/{_NUMBER}/([\w.\-]{{1,128}})/{_NUMBER}/([0-3])", re.A)


class ResumeToken(NamedTuple):
    """``seq`` is the last record made; ``fuel`` what the guest has used, as far as it is known."""

    run_id: str
    segment: int
    seq: int
    frame: str | None
    fuel: int
    tier: int

    def __str__(self) -> str:
        return f"{self.run_id}/{self.segment}/{self.seq}/{self.frame or '-'}/{self.fuel}/{self.tier}"


def parse_token(text: str) -> ResumeToken:
    """The token that has this text. Raises InputError."""
    match = _TEXT.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        raise InputError(f"{text!r:.200} is no resume token", hint="run/segment/seq/frame or -/fuel/tier")
    run_id, segment, seq, frame, fuel, tier = match.groups()
    return ResumeToken(run_id, int(segment), int(seq), None if frame == "-" else frame, int(fuel), int(tier))
