"""Bindings of tools in a process, and in what is forked from it."""

from typing import Final

from agentrt.tools.binding import Binding, failure
from agentrt.tools.importing import resolve
from agentrt.tools.protocol import ToolRef

#: What was loaded here, or in the process this one was forked from.
_loaded: Final[dict[tuple[str, str], Binding]] = {}


class Loader:
    """Loads tools; a source that cannot be imported is tried once."""

    def __init__(self) -> None:
        self._broken: dict[str, str] = {}

    def load(self, ref: ToolRef) -> Binding | tuple[bytes, str]:
        """The tool's binding, or (payload, code) of why it has none. Whatever the import raises is caught."""
        binding = _loaded.get((ref.name, ref.ref))
        if binding is not None:
            return binding
        source = ref.ref.rpartition(":")[0]
        problem = self._broken.get(source)
        if problem is None:
            try:
                binding = _loaded[ref.name, ref.ref] = Binding(resolve(ref.name, ref.ref))
                return binding
            except BaseException as error:  # SystemExit at import must not end the process
                problem = f"{type(error).__name__}: {error}"
                if isinstance(error, (ImportError, SyntaxError, SystemExit)):
                    self._broken[source] = problem
        return failure("tool_import", f"tool {ref.name} cannot be loaded: {problem}")
