"""How long a thread may run before who wakes up gets its CPU, as it asks the kernel itself (EEVDF, Linux 6.12 on).

Whoever runs is left alone until its slice is over, which the kernel looks at once a tick, 4 ms at 250 Hz, unless who
wakes up has a shorter one. All have the same if nobody asks. So whoever computes asks for a longer one: nobody waits
for it then, and it loses nothing over time. Anyone may, for processes of its own.
"""

import ctypes
import os
import platform
import struct
from typing import Final

#: sched_setattr and sched_getattr.
_CALLS: Final = {"x86_64": (314, 315), "aarch64": (274, 275)}
#: struct sched_attr: size, policy, flags, nice, priority, runtime, deadline, period, and two of utilisation.
_ATTR: Final = struct.Struct("=IIQiIQQQII")
_libc: Final = ctypes.CDLL(None, use_errno=True)


def ask_for_slice(tid: int, slice_ns: int) -> bool:
    """Ask for slices of 0.1 to 100 ms for this thread, which is of the ordinary policy; 0: the kernel's own. False: it
    is gone, of someone else, or of another policy. Kernels that know of no slices do nothing."""
    calls = _CALLS.get(platform.machine())
    attributes = _attributes(tid)
    if calls is None or attributes is None or attributes[1] != os.SCHED_OTHER:
        return False
    asked = _ATTR.pack(_ATTR.size, os.SCHED_OTHER, attributes[2], attributes[3], 0, slice_ns, 0, 0, 0, 0)
    return int(_libc.syscall(calls[0], ctypes.c_int(tid), asked, ctypes.c_uint(0))) == 0


def slice_of(tid: int) -> int:
    """In ns, as the kernel has it; 0 if it knows of none, or the thread is gone."""
    attributes = _attributes(tid)
    return 0 if attributes is None else attributes[5]


def _attributes(tid: int) -> tuple[int, ...] | None:
    calls = _CALLS.get(platform.machine())
    found = ctypes.create_string_buffer(_ATTR.size)
    if calls is None or _libc.syscall(calls[1], ctypes.c_int(tid), found, ctypes.c_uint(_ATTR.size), ctypes.c_uint(0)):
        return None
    return _ATTR.unpack(found.raw)
