"""Every bad guest at once, beside good ones: each is refused or ends its own run, typed; the good ones go on."""

import asyncio
import sys
from pathlib import Path

import pytest

from agentrt import Runtime, load_config
from agentrt.errors import AgentrtError, InputError, ModuleError, RunError

sys.path.insert(0, str(Path(__file__).parent))
import runtime_tools

BAD = sorted((Path(__file__).parents[1] / "guests").glob("*.wasm"))
GOOD = Path(__file__).parents[2] / "examples/guests/steps.wasm"
FUEL = 2_000_000_000  # a second of looping: enough for whoever ends, an end for whoever does not
GOOD_RUNS = 30


async def end_of(runtime: Runtime, module: Path) -> str:
    """How registering and running the module ended: a code, or "succeeded"."""
    try:
        await runtime.register(module.stem, module, fuel=FUEL)
        run = await runtime.submit(module.stem, {"tool": "nobody", "args": {}, "steps": 2}, tier=2)
        await run.result()
    except (ModuleError, InputError, RunError) as error:
        return error.code
    return "succeeded"


@pytest.mark.usefixtures("ledger")
def test_bad_guests_end_alone(tmp_path: Path) -> None:
    config = load_config(
        arguments={
            "store.path": str(tmp_path / "store"),
            "store.force_place": True,
            "wasm.cache_path": str(tmp_path / "modules"),
            "wasm.guests_max": 300,
            "wasm.memory_bytes_max": 64 << 20,
        }
    )

    async def main() -> tuple[dict[str, str], list[object]]:
        async with Runtime(config=config, tools=[runtime_tools.ledger_add]) as runtime:
            await runtime.register("steps", GOOD)
            bad = {module.stem: asyncio.create_task(end_of(runtime, module)) for module in BAD}
            runs = [await runtime.submit("steps", {"order": f"good-{n}", "steps": 3}) for n in range(GOOD_RUNS)]
            good = await asyncio.gather(*(run.result() for run in runs))
            ends = {name: await task for name, task in bad.items()}
            with pytest.raises(AgentrtError):
                await runtime.submit("nobody")
            assert (await runtime.statistics()).engine.live == 0  # nothing is left of any of them
            return ends, good

    ends, good = asyncio.run(main())
    assert good == [{"order": f"good-{n}", "steps": 3} for n in range(GOOD_RUNS)]
    assert ends["unknown_import"] == ends["wasi_import"] == "unknown_import"
    assert ends["import_memory"] == ends["import_type"] == "unknown_import"
    assert ends["no_entry"] == ends["entry_kind"] == ends["entry_type"] == "no_entry"
    assert ends["big_memory"] == ends["big_table"] == "module_limit"
    assert ends["invalid"] == ends["memory64"] == ends["shared_memory"] == ends["two_memories"] == "module"
    assert ends["trap"] == ends["out_of_bounds"] == ends["start_trap"] == ends["deep"] == "trap"
    assert ends["spin"] == ends["start_spin"] == "budget_exhausted"
    assert ends["return_seven"] == "run_failed"
    assert ends["abuse"] == "succeeded"  # it checks by itself that each wrong argument got its status
