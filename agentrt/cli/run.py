"""``agentrt run``."""

import asyncio
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from agentrt.cli import exits
from agentrt.cli.main import print_json
from agentrt.cli.remote import connected, named_node, node_options
from agentrt.cli.tables import plain
from agentrt.config import load_config
from agentrt.errors import InputError
from agentrt.tiers import parse_tier

if TYPE_CHECKING:
    from agentrt.client.ask import Ask
    from agentrt.engine.info import RunResult
    from agentrt.http.types import Accepted
    from agentrt.node.sources import AgentSpec
    from agentrt.tools.spec import ToolSpec


@click.command(name="run")
@click.argument("agent", metavar="AGENT")
@node_options
@click.option("--input", "given", default="null", metavar="JSON", help="Input; @FILE reads a file; default: null.")
@click.option("--name", help="Name of the agent; default: the file's.")
@click.option("--tier", help="0 to 3, or urgent, normal, batch, maintenance; default: 1, or on a node the agent's.")
@click.option("--tenant", help="For whom it runs; default: default, or on a node the API key's.")
@click.option("--store", metavar="DIR", help="Folder of the store; default: store.path, else a temporary one.")
@click.option("--fuel", type=click.IntRange(min=1), help="Guest work the run may use; default: limits.run_fuel_max.")
@click.option(
    "--idempotency-key",
    metavar="KEY",
    help="The same key, agent and input give the run there is instead of a second one.",
)
@click.option(
    "--tool",
    "tools",
    multiple=True,
    metavar="SOURCE",
    help="Tools the agent may call: pkg.module:function, pkg.module, or file.py; repeatable.",
)
@click.option("--no-wait", is_flag=True, help="On a node: print the run's id and leave it alone.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object: run_id, state, result, error, fuel, slot_ns.")
@click.pass_obj
def command(
    config_file: str | None,
    agent: str,
    url: str | None,
    key: str | None,
    given: str,
    name: str | None,
    tier: str | None,
    tenant: str | None,
    store: str | None,
    fuel: int | None,
    idempotency_key: str | None,
    tools: tuple[str, ...],
    no_wait: bool,
    as_json: bool,
) -> exits.ExitCode:
    """Run an agent to its end and print its result.

    With --url, AGENT is the name of one that the node there knows. Without, it is a wasm file, or a Python file with
    one agent (or FILE.py:FUNCTION), which runs here: with --store everything accepted survives, whatever happens to
    this process, the next command on that store goes on with it, and with --idempotency-key the same command gets its
    result. Tools of the same Python file need no --tool.
    """
    value = read_input(given)
    level = None if tier is None else int(parse_tier(tier))
    if named_node(url, store):
        from agentrt.client.ask import submit

        if name or tools:
            raise click.UsageError("--name and --tool are for runs in this process; the node has its own")
        asked = submit(agent, value, tier=level, tenant=tenant, fuel=fuel, idempotency_key=idempotency_key)
        if no_wait:
            with connected(url, key) as client:
                run_id = client.send_ask(asked).run_id
            print_json({"run_id": run_id}) if as_json else click.echo(run_id)
            return exits.OK
        return _report(_run_on_node(url, key, asked, as_json), as_json)
    if no_wait:
        raise click.UsageError("--no-wait needs a node; without, the run ends with this process")
    config = load_config(config_file, arguments={"store.path": store})
    found, specs = _to_run(agent, [spec for source in tools for spec in find_tools(source)])

    async def run() -> dict[str, Any]:
        from agentrt import Runtime, Via

        async with Runtime(config=config, tools=specs) as runtime:
            title = name or found.name
            await runtime.register(title, **found.arguments())
            submitted = await runtime.submit(
                title,
                value,
                tenant=tenant or "default",
                tier=level,
                idempotency_key=idempotency_key,
                fuel=fuel,
                via=Via("cli", wait=True),
            )
            if not as_json:
                click.echo(f"{submitted.run_id} accepted", err=True)
            return describe(await submitted.wait())

    return _report(asyncio.run(run()), as_json)


def _to_run(agent: str, tools: "list[ToolSpec]") -> "tuple[AgentSpec, list[ToolSpec]]":
    """The one agent of a source, and its tools beside the given ones. Raises UsageError, InputError."""
    from agentrt.node.sources import AgentSpec, describe

    path = Path(agent)
    if path.is_file() and path.suffix != ".py":
        return AgentSpec(path.stem, "wasm", agent), tools
    if not path.is_file() and not Path(agent.rpartition(":")[0]).is_file():
        raise click.UsageError(f"there is no file {agent}; to run an agent of a node, use --url")
    described = describe(agent)
    if len(described.agents) != 1:
        names = ", ".join(found.name for found in described.agents)
        raise InputError(
            f"{agent} has {len(described.agents)} agents{names and ': ' + names}", hint="Name one: FILE.py:FUNCTION"
        )
    given = {tool.name for tool in tools}
    return described.agents[0], [*tools, *(tool for tool in described.tools if tool.name not in given)]


def _run_on_node(url: str | None, key: str | None, asked: "Ask[Accepted]", as_json: bool) -> dict[str, Any]:
    with connected(url, key) as client:
        accepted = client.send_ask(asked)
        if not as_json:
            click.echo(f"{accepted.run_id} accepted", err=True)
        for _ in client.events(accepted.run_id):
            pass
        run = plain(client.run(accepted.run_id))
    cost = run.get("cost") or {}
    return {
        "run_id": run["run_id"],
        "state": run["state"],
        "result": run.get("result"),
        "error": run.get("error"),
        "fuel": cost.get("fuel", 0),
        "slot_ns": cost.get("slot_ns", 0),
    }


def _report(outcome: dict[str, Any], as_json: bool) -> exits.ExitCode:
    failed = outcome["error"] is not None
    if as_json:
        print_json(outcome)
    elif failed:
        error = outcome["error"]
        click.echo(f"{outcome['run_id']} {outcome['state']}: {error['message']} [{error['code']}]", err=True)
    else:
        click.echo(json.dumps(outcome["result"], ensure_ascii=False, indent=2))
    return exits.FAILED if failed else exits.OK


def describe(result: "RunResult") -> dict[str, Any]:
    """How the run ended, as plain data; ``error`` is None if it SUCCEEDED."""
    return {
        "run_id": result.run_id,
        "state": result.state.value,
        "result": json.loads(result.result) if result.result is not None else None,
        "error": json.loads(result.error) if result.error is not None else None,
        "fuel": result.cost.fuel,
        "slot_ns": result.cost.slot_ns,
    }


def read_input(text: str) -> Any:
    """The value of JSON text, or of a file named by ``@FILE``. Raises InputError."""
    if text.startswith("@"):
        try:
            text = Path(text[1:]).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"the input cannot be read: {error}") from error
    try:
        return json.loads(text)
    except ValueError as error:
        hint = "Text needs quotes of its own: --input '\"text\"'"
        raise InputError(f"the input is not JSON: {error}", hint=hint) from error


def find_tools(source: str) -> "list[ToolSpec]":
    """The tools of ``module``, ``file.py``, or one of them by ``:function``. Raises InputError."""
    from agentrt.tools.importing import describe_tools

    place, colon, function = source.rpartition(":")
    if not colon:
        return describe_tools(source)
    specs = [spec for spec in describe_tools(place) if spec.ref.rpartition(":")[2] == function]
    if not specs:
        raise InputError(f"{place} has no tool function {function}", hint="Decorate it with @tool(kind=…)")
    return specs
