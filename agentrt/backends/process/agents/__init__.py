"""Agents that are programs of any kind: the syscall table as JSON lines over an inherited socket.

docs/process-abi.md is the manual for whoever writes one.
"""
