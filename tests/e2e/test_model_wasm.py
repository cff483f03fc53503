"""A wasm guest asks a model: op 2, model.generate."""

import asyncio
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))
from interpreters import script

from agentrt import Runtime, load_config
from agentrt.testing.models import ModelServer, Reply

SCRIPT = """
import host, json, sys

def model(**request):
    return json.loads(host.call("model.generate", json.dumps(request)))

topic = json.loads(sys.stdin.read())
first = model(profile="work", messages=[{"role": "user", "content": topic}], schema={"type": "array"})
second = model(profile="none", messages=[])
print(json.dumps([first["value"]["data"], first["value"]["usage"]["output_tokens"], second["error"]["code"]]))
"""


def test_a_script_asks_a_model(tmp_path: Path) -> None:
    async def main(server: ModelServer) -> Any:
        config = load_config(env={}, arguments={"store.kind": "memory", "wasm.guests_max": 50} | server.config())
        async with Runtime(config=config) as runtime:
            await runtime.register("asks", script("micropython", SCRIPT))
            return await (await runtime.submit("asks", "birds")).result()

    with ModelServer() as server:
        server.script = [Reply(text='["owl"]', usage=(10, 5))]
        assert asyncio.run(main(server)) == [["owl"], 5, "unknown_profile"]
        assert server.requests[0].body["messages"][0]["content"] == "birds"
