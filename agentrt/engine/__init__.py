"""The run engine: accepts runs, drives their guests, journals their steps, brings them back after a restart.

- machine/: the state machine of one run; pure: no I/O, time comes in. history.py: a journal made ready for replay.
- engine.py: the thin shell around all machines, and what becomes of each. ports.py: what the two ask of others.
- entrance.py: who comes in. effects.py: what steps do. loading.py, wakes.py: how and why runs come back to memory.
  orders.py, queries.py: what runs are told and asked from outside. places.py: where each is. access.py: the store.
- accept.py, admission.py: what is let in, and how much. recovery.py: what starts again after a restart, and how fast.
- flusher.py: outcomes that wait for company. waiters.py: who waits for which end. views.py, info.py: what is told.
- control.py: the control thread and the bridge to it. priority.py: its rank. loopwatch.py: turns that take too long.
- logrelay.py: guests' log lines. crashpoints.py: named places at which a test kills the process.
"""
