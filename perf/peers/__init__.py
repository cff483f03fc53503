"""Durable execution by others, measured as perf.steps measures agentrt: runs of some trivial steps, one run at a time
and many at once, each step durable before the next one starts.

A peer is a module ``NAME_steps`` here that is run as a program. It imports its packages and the standard library,
nothing else, so peers may be installed in an environment of their own, whose interpreter the variable PEERS_PYTHON
names; the default is the interpreter that measures, with agentrt's extra ``peers``.
"""
