"""OS priority of the control thread and the store's writer: above the workers, or answers wait for guests.

Threads that these start, and processes that they fork, begin at ordinary priority (SCHED_RESET_ON_FORK).
"""

import os
from typing import Final

_RR_PRIORITY: Final = 1  # any real-time priority ranks above all ordinary threads


def raise_thread(thread_id: int, *, nice: int, realtime: bool) -> str:
    """Raise a thread of this process (kernel's id) as far as permitted; returns what is in force, for people."""
    if realtime:
        try:
            os.sched_setscheduler(thread_id, os.SCHED_RR | os.SCHED_RESET_ON_FORK, os.sched_param(_RR_PRIORITY))
            return f"SCHED_RR {_RR_PRIORITY}"
        except OSError:
            pass  # not permitted; nice may be
    if nice:
        try:
            os.setpriority(os.PRIO_PROCESS, thread_id, nice)
            os.sched_setscheduler(thread_id, os.SCHED_OTHER | os.SCHED_RESET_ON_FORK, os.sched_param(0))
        except OSError:
            pass
    return f"nice {os.getpriority(os.PRIO_PROCESS, thread_id)}"
