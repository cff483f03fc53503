"""The run engine: accepts runs, drives their guests, journals their steps, brings them back after a restart.

ports.py       what the engine asks of its surroundings
history.py     a journal, made ready for replay
machine.py     the state machine of one run; pure: no I/O, time comes in
engine.py      the thin shell around all machines: store, backend, tools
admission.py   how much may be accepted and not ended
recovery.py    which runs start again after a restart, and how fast
flusher.py     outcomes that wait for company, at most 200 us
loopwatch.py   law 11: a turn of the control loop that takes too long is reported
crashpoints.py named places at which a test kills the process
"""
