"""cgroup v2 through its file system: one delegated group, in it a leaf per process, all siblings. No daemon.

`layout.py` says what this process may use, `tree.py` takes the group and makes leaves, `leaf.py` is one of them,
`weights.py` shares the CPU between tiers, `pressure.py` finds processes that are throttled without progress, `files.py`
is the only thing that touches the file system. All calls are short and synchronous; one thread at a time.
"""
