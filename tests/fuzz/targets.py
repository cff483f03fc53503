"""All targets, registered by importing the modules that have them."""

from typing import Final

from . import exports, host, http, journal, messages, models, processes, programs, rows, syscalls, texts  # noqa: F401 (imported for what they register)
from .kit import TARGETS

#: The targets of each module, which share a minute.
GROUPS: Final[dict[str, list[str]]] = {}
for _name, _target in TARGETS.items():
    GROUPS.setdefault(_target.run.__module__.rpartition(".")[2], []).append(_name)
