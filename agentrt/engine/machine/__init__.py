"""The state machine of one run, in layers, each a file and built on those before it.

state.py what it knows and its records; settling.py steps begin and get their outcomes; unseen.py steps whose outcome
nobody saw; replay.py the journal is played to a guest; endings.py ends, waits for people, leaving memory; run.py what
guests, tools, the store and the engine tell it.
"""

from agentrt.engine.machine.run import RunMachine
from agentrt.engine.machine.state import DEADLINE_PATH, HOLD_PATH, START_PATH, Phase, Told
from agentrt.engine.machine.unseen import RETRY_REASON

__all__ = ["DEADLINE_PATH", "HOLD_PATH", "RETRY_REASON", "START_PATH", "Phase", "RunMachine", "Told"]
