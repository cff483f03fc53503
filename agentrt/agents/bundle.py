"""An agent's own code: the files that make up its version, and their copy for each run.

A bundle is the file, or the regular package with all its ``.py`` files, in which an agent is defined. Its modules are
executed anew for each run, so that no run sees another's globals; everything else is imported once for all.
"""

import builtins
import hashlib
import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, Final, NamedTuple

from agentrt.agents.current import current
from agentrt.errors import ModuleError

FILES_MAX: Final = 4_000
BYTES_MAX: Final = 64 << 20


class Source(NamedTuple):
    """One module of a bundle."""

    name: str
    path: Path
    package: bool
    data: bytes


class Bundle:
    """The files of ``module``, which has been imported as ``module.__name__``."""

    def __init__(self, module: ModuleType) -> None:
        """Reads the files. Raises ModuleError if there are none, or too many."""
        self.module: Final = module.__name__
        self.sources: Final = {source.name: source for source in _sources(module)}
        self.digest: Final = _digest(list(self.sources.values()))
        self._code: dict[str, CodeType] = {}

    def compile(self, imported: Sequence[str]) -> None:
        """Compile what was imported already, before processes are forked. Raises SyntaxError."""
        for name in imported:
            if name in self.sources:
                self.code(name)

    def code(self, name: str) -> CodeType:
        """A module's code, of the bytes that the digest covers."""
        code = self._code.get(name)
        if code is None:
            source = self.sources[name]
            code = compile(source.data, str(source.path), "exec", dont_inherit=True)
            self._code[name] = code
        return code


class RunModules:
    """The bundle's modules as one run has them."""

    __slots__ = ("_bundle", "_modules")

    def __init__(self, bundle: Bundle) -> None:
        self._bundle = bundle
        self._modules: dict[str, ModuleType] = {}

    def load(self, name: str) -> ModuleType:
        """Execute the module, and its packages before it, unless that was done. Raises what its code raises."""
        module = self._modules.get(name)
        if module is not None:
            return module
        parent, _, short = name.rpartition(".")
        above = self.load(parent) if parent in self._bundle.sources else None
        source = self._bundle.sources[name]
        module = ModuleType(name)
        fields = module.__dict__
        original = sys.modules.get(name)
        fields["__file__"] = str(source.path)
        fields["__builtins__"] = run_builtins
        fields["__spec__"] = getattr(original, "__spec__", None)
        fields["__package__"] = name if source.package else parent
        if source.package:
            fields["__path__"] = [str(source.path.parent)]
        marker = getattr(original, "__agentrt_source__", None)
        if marker is not None:
            fields["__agentrt_source__"] = marker
        self._modules[name] = module
        try:
            exec(self._bundle.code(name), fields)
        except BaseException:
            del self._modules[name]
            raise
        if above is not None:
            setattr(above, short, module)
        return module

    def import_(
        self,
        name: str,
        globals: Mapping[str, object] | None = None,
        locals: Mapping[str, object] | None = None,
        fromlist: Sequence[str] | None = (),
        level: int = 0,
    ) -> ModuleType:
        """What ``import`` does in the bundle's modules."""
        sources = self._bundle.sources
        package = "" if globals is None else str(globals.get("__package__") or "")
        absolute = importlib.util.resolve_name("." * level + name, package) if level else name
        replaced = replacements.get(absolute)
        if replaced is not None:
            return replaced
        if absolute not in sources:
            return builtins.__import__(name, globals, locals, fromlist or (), level)
        module = self.load(absolute)
        if not fromlist:
            return module if level else self.load(absolute.partition(".")[0])
        for part in fromlist:
            inner = f"{absolute}.{part}"
            if inner in sources and not hasattr(module, part):
                self.load(inner)
        return module


def _import(
    name: str,
    globals: Mapping[str, object] | None = None,
    locals: Mapping[str, object] | None = None,
    fromlist: Sequence[str] | None = (),
    level: int = 0,
) -> ModuleType:
    run = current.run
    if run is None or run.modules is None:
        return builtins.__import__(name, globals, locals, fromlist or (), level)
    modules: RunModules = run.modules
    return modules.import_(name, globals, locals, fromlist, level)


def _print(*values: Any, sep: str | None = " ", end: str | None = "\n", file: Any = None, flush: bool = False) -> None:
    run = current.run
    if run is None or file is not None:
        builtins.print(*values, sep=sep, end=end, file=file, flush=flush)
    else:
        run.log("info", (" " if sep is None else sep).join(map(str, values)))


#: Modules that an agent gets instead of the real ones; see agentrt.agents.determinism.
replacements: dict[str, ModuleType] = {}

#: ``__builtins__`` of all modules of all runs of a host. What is printed becomes a log line.
run_builtins: Final[dict[str, Any]] = vars(builtins) | {"__import__": _import, "print": _print}


def find(module: ModuleType, qualname: str) -> Callable[..., Any] | None:
    """A function of the module by its qualified name."""
    found: Any = module
    for part in qualname.split("."):
        found = getattr(found, part, None)
    return found if callable(found) else None


def _sources(module: ModuleType) -> list[Source]:
    file = getattr(module, "__file__", None)
    if file is None or not file.endswith(".py"):
        raise ModuleError(f"{module.__name__} is not loaded from a .py file")
    path = Path(file)
    root = _package_root(module.__name__)
    if root is None:
        return [Source(module.__name__, path, path.name == "__init__.py", path.read_bytes())]
    name, folder = root
    out: list[Source] = []
    size = 0
    for each in sorted(folder.rglob("*.py")):
        parts = each.relative_to(folder).with_suffix("").parts
        package = parts[-1] == "__init__"
        if not all(part.isidentifier() for part in parts):
            continue
        data = each.read_bytes()
        size += len(data)
        out.append(Source(".".join((name, *parts[: -1 if package else None])), each, package, data))
        if len(out) > FILES_MAX or size > BYTES_MAX:
            raise ModuleError(
                f"the package {name} has more than {FILES_MAX} files or {BYTES_MAX >> 20} MiB",
                hint="Put agents into a package of their own",
            )
    return out


def _package_root(name: str) -> tuple[str, Path] | None:
    """The outermost regular package that the module belongs to, and its folder."""
    parts = name.split(".")
    for end in range(1, len(parts) + 1):
        module = sys.modules.get(".".join(parts[:end]))
        file = getattr(module, "__file__", None)
        if file is not None and Path(file).name == "__init__.py":
            return ".".join(parts[:end]), Path(file).parent
    return None


def _digest(sources: list[Source]) -> str:
    total = hashlib.sha256()
    for source in sorted(sources):
        # A file's own name counts, its folder does not: the same code elsewhere is the same version.
        title = f"{source.name.rpartition('.')[2] if len(sources) == 1 else source.name}"
        stem = source.path.stem if len(sources) == 1 else title
        total.update(b"%d %d " % (len(stem.encode()), len(source.data)) + stem.encode() + source.data)
    return total.hexdigest()
