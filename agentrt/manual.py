"""docs/plugins/hooks.md, the manual of plugins, from the hookspecs and the contracts that they name."""

import enum
import importlib
import inspect
import re
import typing
from collections.abc import Iterator
from typing import Any, Final

import msgspec

from agentrt import hooks
from agentrt.records import Record

_INTRODUCTION: Final = hooks.__doc__ or ""
_RECORDS: Final = " | ".join(kind.__name__ for kind in typing.get_args(Record))


def page(generated: str) -> str:
    """The page; ``generated``: its mark."""
    from agentrt.reference import table

    introduction = _INTRODUCTION.strip().partition("\n")[2].strip()
    lines = ["# Hooks: the manual of plugins", "", generated, "", _markdown(introduction), ""]
    lines += table(
        ("kind", "hook", "chosen by", "thread", "when it raises", "contract suite"),
        (
            (kind, f"[`{hook}`](#{hook})", facts.chosen_by, facts.thread, facts.on_error, _suite(facts))
            for kind, hook, facts in ((kind, hook, hooks.FACTS[hook]) for kind, hook in hooks.HOOKS.items())
        ),
    )
    for hook in ("agentrt_settings", *hooks.HOOKS.values()):
        spec = getattr(hooks, hook)
        lines += ["", f"## {hook}", "", _markdown(inspect.cleandoc(spec.__doc__ or ""))]
        facts = hooks.FACTS.get(hook)
        for reference in facts.contract if facts is not None else ():
            lines += ["", *_described(reference)]
    return "\n".join(lines) + "\n"


def _suite(facts: hooks.Facts) -> str:
    return f"`{facts.suite.replace(':', '.')}`" if facts.suite else ""


def named(reference: str) -> Any:
    """What ``module:name`` names."""
    module, _, name = reference.partition(":")
    return getattr(importlib.import_module(module), name)


def _described(reference: str) -> Iterator[str]:
    """A contract's class: what it is for, its fields or attributes, its methods. Or a function, or a type's alias."""
    kind = named(reference)
    yield f"### {reference.partition(':')[2]}"
    yield ""
    yield f"`from {reference.replace(':', ' import ')}`"
    if inspect.isfunction(kind):
        yield ""
        yield _listed(kind.__name__, kind)
        return
    if not isinstance(kind, type):  # a type alias
        about = _said_before(*reference.split(":"))
        if about:
            yield ""
            yield _markdown(about)
        yield ""
        yield "`" + _plain(str(kind)) + "`"
        return
    about = inspect.cleandoc(kind.__doc__ or "")
    if about and not about.startswith(f"{kind.__name__}("):
        yield ""
        yield _markdown(about)
    members = [*_members(kind)]
    if members:
        yield ""
        yield "```text"
        yield from members
        yield "```"
    for name, function in _methods(kind):
        yield ""
        yield _listed(name, function)


def _listed(name: str, function: Any) -> str:
    text = inspect.cleandoc(function.__doc__ or "").replace("\n\n", "<br>").replace("\n", " ")
    return f"- `{name}{_plain(str(inspect.signature(function)))}`" + (f": {_markdown(text)}" if text else "")


def _said_before(module: str, name: str) -> str:
    """The comment before an alias, whose object has no room for one."""
    text = inspect.getsource(importlib.import_module(module))
    found = re.search(rf"((?:^#: .*\n)+)^{name} = ", text, re.MULTILINE)
    return "" if found is None else found[1].replace("#: ", "").strip()


def _comments(kind: type) -> dict[str, str]:
    """What stands beside its fields, or above them."""
    text = inspect.getsource(kind)
    found = {name: said for said, name in re.findall(r"^    #: (.*)\n    (\w+):", text, re.MULTILINE)}
    return found | dict(re.findall(r"^    (\w+): [^#\n]*?  # (.+)$", text, re.MULTILINE))


def _members(kind: type) -> Iterator[str]:
    """Fields with their defaults; attributes of a protocol."""
    if issubclass(kind, Exception):
        yield f"{kind.__name__}{_plain(str(inspect.signature(kind)))}"
        return
    defaults: dict[str, Any] = dict(getattr(kind, "_field_defaults", {}))
    if issubclass(kind, msgspec.Struct):  # its defaults belong to the last fields
        last = kind.__struct_defaults__
        defaults = dict(zip(kind.__struct_fields__[len(kind.__struct_fields__) - len(last) :], last, strict=True))
    if issubclass(kind, enum.Enum):
        yield from (repr(each.value) for each in kind)
        return
    comments = _comments(kind)
    for name, hint in inspect.get_annotations(kind).items():
        if not name.startswith("_") and not str(hint).startswith("typing.ClassVar"):
            said = f"  # {comments[name]}" if name in comments else ""
            if hasattr(hint, "__metadata__"):  # a setting
                said = f"  # {hint.__metadata__[0].description}"
                hint = hint.__origin__
            yield f"{name}: {_plain(_name_of(hint))}" + _default(defaults.get(name, msgspec.NODEFAULT)) + said


def _methods(kind: type) -> Iterator[tuple[str, Any]]:
    for name, value in vars(kind).items():
        function = value.fget if isinstance(value, property) else value
        if inspect.isfunction(function) and not name.startswith("_"):
            if inspect.iscoroutinefunction(function):
                name = f"async {name}"
            yield (f"property {name}" if isinstance(value, property) else name), function


def _default(value: Any) -> str:
    if value is msgspec.NODEFAULT:
        return ""
    made = getattr(value, "factory", None)  # msgspec's, of empty containers
    return f" = {value!r}" if made is None else f" = {made()!r}"


def _name_of(hint: Any) -> str:
    return hint.__name__ if isinstance(hint, type) and not typing.get_args(hint) else str(hint)


def _plain(text: str) -> str:
    """Names without their modules, and no addresses of objects."""
    text = re.sub(r"<(?:function|class|object) '?([^ '>]+)[^>]*>", r"\1", text)
    text = re.sub(r"ForwardRef\('([^']*)'\)", r"\1", text)
    text = re.sub(r"(?:[a-z_]+\.)+(?=[A-Za-z_])", "", text)
    text = re.sub(r"(?<=: |> )'([^']+)'", r"\1", text)  # annotations that are text
    return text.replace(_RECORDS, "Record")


def _markdown(text: str) -> str:
    """Docstrings mark code as reStructuredText does."""
    return text.replace("``", "`")
