"""A deterministic simulation of the engine: virtual time, injected faults, every law checked; one seed is one history.

- loop.py: virtual time and what the engine needs of an event loop. world.py: one seed from its first submit to its end.
- store.py, tools.py, guests.py: the engine's surroundings, with latency and faults. programs.py: what guests do.
- laws.py: what must hold, and what is compared with what. mutants.py: planted bugs, each of which must be found.

``python -m tests.sim --seeds 0..999`` looks for a seed that breaks a law; ``--seeds 17..17 --trace`` shows one.
"""
