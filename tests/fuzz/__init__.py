"""Fuzzers of what reads bytes in Python: ``python -m tests.fuzz NAME --seconds 60``, by atheris (libFuzzer).

A target is a function of bytes that raises if agentrt is wrong: another exception than an `AgentrtError`, a value that
changes when it is written and read again, a state that a refused record has changed. Inputs that once mattered are in
``corpus/NAME``; the ordinary suite replays them, without atheris.
"""
