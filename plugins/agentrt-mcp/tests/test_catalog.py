"""The catalog: what a name stands for never changes, and what is kept is found again."""

from typing import Any

import msgspec
import pytest
from agentrt_mcp.catalog import TOOLS_MAX, VERSIONS_MAX, Catalog, Offered, kind_of
from agentrt_mcp.schemas import SCHEMA_BYTES_MAX, SchemaError, compiled, misfit
from agentrt_mcp.settings import ServerSettings
from hypothesis import given
from hypothesis import strategies as st

COMMAND = ServerSettings(command=("server",))


def offered(name: str, schema: Any = None, **more: Any) -> Offered:
    return Offered(name, "", {"type": "object"} if schema is None else schema, **more)


names = st.sampled_from(["a", "b", "c"])
schemas = st.sampled_from([{"type": "object", "required": [key]} for key in "xyz"])
listings = st.lists(
    st.dictionaries(names, schemas).map(lambda tools: [offered(name, schema) for name, schema in tools.items()]),
    max_size=6,
)


@given(listings)
def test_what_a_name_stands_for_does_not_change(all_of: list[list[Offered]]) -> None:
    catalog = Catalog("s", COMMAND)
    seen: dict[str, str] = {}
    for listing in all_of:
        entered, problems = catalog.absorb(listing)
        assert not problems and not {entry.name for entry in entered} & set(seen)
        for name, entry in catalog.entries.items():
            assert seen.setdefault(name, entry.version.version) == entry.version.version
        calls = {tool["name"]: tool["call"] for tool in catalog.listing()}
        assert set(calls) == {f"s.{tool.name}" for tool in listing}
        for tool in listing:
            assert catalog.entries[calls[f"s.{tool.name}"]].version.input_schema == tool.input_schema


@given(listings)
def test_what_is_kept_is_found_again(all_of: list[list[Offered]]) -> None:
    catalog = Catalog("s", COMMAND)
    for listing in all_of:
        catalog.absorb(listing)
    again = Catalog("s", COMMAND)
    again.load(catalog.dump())
    again.remembered()
    newest = {f"s.{tool}": versions[-1].version for tool, versions in catalog._versions.items()}
    assert set(again.entries) == set(catalog.entries)
    for name, entry in again.entries.items():
        expected = newest[name] if name in newest else catalog.entries[name].version.version
        assert entry.version.version == expected


@given(st.binary(max_size=100) | st.recursive(st.none() | st.text() | st.integers(), st.lists).map(msgspec.json.encode))
def test_a_file_that_is_none_is_no_catalog(data: bytes) -> None:
    catalog = Catalog("s", COMMAND)
    catalog.load(data)
    catalog.remembered()
    catalog.absorb([offered("a")])
    assert "s.a" in catalog.entries


def test_versions_and_tools_are_bounded() -> None:
    catalog = Catalog("s", COMMAND)
    for number in range(3 * VERSIONS_MAX):
        catalog.absorb([offered("a", {"type": "object", "maxProperties": number})])
    assert len(msgspec.json.decode(catalog.dump())["tools"]["a"]) == VERSIONS_MAX
    _, problems = Catalog("s", COMMAND).absorb([offered(f"t{number}") for number in range(TOOLS_MAX + 1)])
    assert "more than" in problems[0]


@pytest.mark.parametrize(
    "tool",
    [
        offered("a/b"),
        offered(""),
        offered("x" * 129),
        offered("line\nbreak"),
        offered("a", {"type": "nonsense"}),
        offered("a", {"type": "object", "description": "x" * SCHEMA_BYTES_MAX}),
        offered("a", {"properties": {"x": {"$ref": "http://127.0.0.1:9/schema.json"}}}),
        offered("a", output_schema={"type": 3}),
    ],
)
def test_what_will_not_do_is_left_out_and_said(tool: Offered) -> None:
    catalog = Catalog("s", COMMAND)
    entered, problems = catalog.absorb([tool, offered("fine")])
    assert {entry.version.tool for entry in entered} == {"fine"} and len(problems) == 1


def test_only_what_the_settings_name() -> None:
    catalog = Catalog("s", ServerSettings(command=("server",), tools=("a", "missing")))
    entered, problems = catalog.absorb([offered("a"), offered("b")])
    assert {entry.version.tool for entry in entered} == {"a"}
    assert len(problems) == 1 and "'missing'" in problems[0]


@pytest.mark.parametrize("trusted", [False, True])
@pytest.mark.parametrize("read_only", [False, True])
@pytest.mark.parametrize("idempotent", [False, True])
def test_kinds(trusted: bool, read_only: bool, idempotent: bool) -> None:
    """No hint says that a result depends on the arguments alone, so none makes a tool pure."""
    tool = offered("a", read_only=read_only, idempotent=idempotent)
    believed = trusted and (read_only or idempotent)
    assert kind_of(tool, ServerSettings(url="http://x", trust_hints=trusted)) == (
        "keyed" if believed else "at_most_once"
    )
    said = ServerSettings(url="http://x", trust_hints=trusted, kinds={"a": "pure"})
    assert kind_of(tool, said) == "pure"


def test_a_tool_that_has_become_stricter_is_not_repeated_as_before() -> None:
    settings = ServerSettings(command=("server",), trust_hints=True)
    catalog = Catalog("s", settings)
    catalog.absorb([offered("a", read_only=True)])
    entry = catalog.entries["s.a"]
    assert catalog.superseded(entry) == ""
    catalog.absorb([offered("a")])
    assert "at_most_once now, not keyed" in catalog.superseded(entry)
    catalog.absorb([offered("a", read_only=True)])
    assert catalog.superseded(entry) == ""


def test_a_pattern_of_a_stranger_has_a_bound() -> None:
    validator = compiled({"type": "string", "pattern": r"^(\w+\s?)*\1$"})
    assert misfit(validator, "a" * 60 + "!")
    with pytest.raises(SchemaError):
        compiled({"pattern": "("})


def test_schemas_and_values_may_be_as_deep_as_decoders_let_through() -> None:
    validator = compiled({"type": "object", "properties": {"x": {"$ref": "#"}}})
    for depth in (50, 900):
        assert misfit(validator, msgspec.json.decode('{"x":' * depth + "{}" + "}" * depth)) == ""
    with pytest.raises(RecursionError):
        msgspec.json.decode('{"x":' * 100_000 + "{}" + "}" * 100_000)
    for schema in ({"$ref": "#"}, {"allOf": [{"$ref": "#"}]}):
        assert isinstance(misfit(compiled(schema), {}), str)
    schema: Any = {}
    for _ in range(900):
        schema = {"properties": {"x": schema}}
    with pytest.raises(SchemaError):
        compiled(schema)
