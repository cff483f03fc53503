"""What the kernel offers to confine a process: `landlock.py` for files, `seccomp.py` for system calls. Pure.

Used on hosts of Python agents (agentrt/agents/confine.py) and on native commands (agentrt/backends/process).
"""

from agentrt.errors import AgentrtError


class SandboxError(AgentrtError):
    """The kernel, or a filter around this process, lacks what confines processes."""

    code = "sandbox"
