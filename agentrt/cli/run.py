"""``agentrt run``."""

import asyncio
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from agentrt.cli import exits
from agentrt.cli.main import print_json
from agentrt.config import load_config
from agentrt.errors import InputError
from agentrt.tiers import parse_tier

if TYPE_CHECKING:
    from agentrt.engine.info import RunResult
    from agentrt.tools.spec import ToolSpec


@click.command(name="run")
@click.argument("module", type=click.Path(exists=True, dir_okay=False, path_type=Path), metavar="MODULE.wasm")
@click.option("--input", "given", default="null", metavar="JSON", help="Input; @FILE reads a file; default: null.")
@click.option("--name", help="Name of the agent; default: the file's.")
@click.option("--tier", default="1", show_default=True, help="0 to 3, or urgent, normal, batch, maintenance.")
@click.option("--tenant", default="default", show_default=True, help="For whom it runs.")
@click.option("--store", metavar="DIR", help="Folder of the store; default: store.path, else a temporary one.")
@click.option("--fuel", type=click.IntRange(min=1), help="Guest work the run may use; default: limits.run_fuel_max.")
@click.option(
    "--key", help="Idempotency key: the same key, module and input give the run there is instead of a second one."
)
@click.option(
    "--tool",
    "tools",
    multiple=True,
    metavar="SOURCE",
    help="Tools the agent may call: pkg.module:function, pkg.module, or file.py; repeatable.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object: run_id, state, result, error, fuel, slot_ns.")
@click.pass_obj
def command(
    config_file: str | None,
    module: Path,
    given: str,
    name: str | None,
    tier: str,
    tenant: str,
    store: str | None,
    fuel: int | None,
    key: str | None,
    tools: tuple[str, ...],
    as_json: bool,
) -> exits.ExitCode:
    """Run a wasm agent to its end and print its result.

    With --store everything accepted survives, whatever happens to this process: the next command on that store goes on
    with it, and with --key the same command gets its result.
    """
    value = read_input(given)
    level = parse_tier(tier)
    config = load_config(config_file, arguments={"store.path": store})
    specs = [spec for source in tools for spec in find_tools(source)]

    async def run() -> dict[str, Any]:
        from agentrt import Runtime

        async with Runtime(config=config, tools=specs) as runtime:
            agent = name or module.stem
            await runtime.register(agent, module)
            submitted = await runtime.submit(agent, value, tenant=tenant, tier=level, idempotency_key=key, fuel=fuel)
            if not as_json:
                click.echo(f"{submitted.run_id} accepted", err=True)
            return describe(await submitted.wait())

    outcome = asyncio.run(run())
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
