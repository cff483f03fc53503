"""Python agents and models: real hosts, a real server, restarts."""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import python_models as agents
from test_admission import serving

from agentrt import Client, Runtime
from agentrt.config import load_config
from agentrt.engine.modelsteps import Streamed
from agentrt.errors import RunCancelledError, StepSettledError
from agentrt.http.sse import TEXT_CHARS_MAX, _Texts
from agentrt.testing.models import ModelServer, Reply


@contextmanager
def node(server: ModelServer | None, store: Path | None = None, **model: Any) -> Iterator[Runtime]:
    arguments: dict[str, Any] = {"wasm.guests_max": 50}
    if server is not None:
        arguments |= server.config(**model)
    if store is None:
        arguments["store.kind"] = "memory"
    with Runtime(store=store, config=load_config(env={}, arguments=arguments), tools=[agents.weather]) as runtime:
        for each in agents.ALL:
            runtime.register_sync(each)
        yield runtime


def test_an_agent_asks_a_model_and_knows_what_it_cost() -> None:
    with ModelServer() as server, node(server, input_price=1_000_000, output_price=3_000_000) as runtime:
        server.script = [Reply(text="Paris", usage=(100, 10))]
        result = runtime.submit_sync("ask", "capital?").result_sync(30)
        assert result == {"text": "Paris", "cost": 130, "tokens": 110, "model": "test"}
        assert server.requests[0].body["messages"] == [{"role": "user", "content": "capital?"}]
        models = runtime.statistics_sync().models
        assert (models.calls, models.failures, models.cost_micro_usd, models.running) == (1, 0, 130, 0)


def test_a_type_is_a_schema_and_comes_back_as_itself() -> None:
    with ModelServer() as server, node(server) as runtime:
        server.script = [Reply(text='{"name": "Oslo", "people": 700000}'), Reply(text='{"name": "Oslo"}')]
        assert runtime.submit_sync("typed", "which?").result_sync(30) == ["Oslo", 700000, '{"name": "Oslo"}']
        wanted = server.requests[0].body["response_format"]["json_schema"]
        assert wanted["strict"] and wanted["schema"]["required"] == ["name", "people"]


def test_an_agent_reasons_and_acts() -> None:
    with ModelServer() as server, node(server) as runtime:
        server.script = [
            Reply(text="", tool_calls=[("weather", '{"city": "Rome", "days": 3}')]),
            Reply(text="It is sunny"),
        ]
        assert runtime.submit_sync("react", "weather in Rome?").result_sync(30) == "It is sunny"
        (told,) = server.requests[0].body["tools"]
        assert told["function"]["name"] == "weather" and told["function"]["description"] == "The weather of a city."
        parameters = told["function"]["parameters"]
        assert parameters["required"] == ["city"] and set(parameters["properties"]) == {"city", "days"}
        assert server.requests[1].body["messages"][-1]["content"] == "Rome: sun for 3 days"


def test_answers_are_recorded_and_not_asked_for_again(tmp_path: Path) -> None:
    with ModelServer() as server:
        server.script = [Reply(text="first"), Reply(text="second")]
        with node(server, tmp_path / "store") as runtime:
            run_id = runtime.submit_sync("careful", "write").run_id
            for _ in range(2000):
                if runtime.describe_run_sync(run_id).wait_reason == "approval":
                    break
                time.sleep(0.01)
        with node(server, tmp_path / "store") as runtime:
            for _ in range(2000):
                try:
                    runtime.run(run_id).approve_sync()
                    break
                except StepSettledError:
                    time.sleep(0.01)
            assert runtime.run(run_id).result_sync(30) == ["first", True, "second"]
        assert len(server.requests) == 2


def test_observers_see_the_text_as_it_comes() -> None:
    with ModelServer() as server, node(server) as runtime:
        told: list[Any] = []
        runtime.observe(lambda event, data: told.append(data) if event == "streamed" else None)
        text = "".join(f"word {n} " for n in range(200))
        server.script = [Reply(text=text, pieces=50, piece_delay=0.001)]
        run = runtime.submit_sync("streams", "tell")
        assert run.result_sync(30) == text
        assert "".join(piece.text for piece in told) == text and len(told) > 1
        assert {(piece.run_id, piece.path, piece.attempt) for piece in told} == {(run.run_id, "1:1", 1)}


def test_callers_over_http_see_the_text_as_it_comes(tmp_path: Path) -> None:
    with ModelServer() as server, node(server, tmp_path / "store") as runtime, serving(runtime, []) as served:
        text = "".join(f"word {n} " for n in range(200))
        server.script = [Reply(text=text, pieces=50, piece_delay=0.01), Reply(text=text)]
        secret = served.admin.headers["authorization"].removeprefix("Bearer ")
        host, port = served.server.address
        with Client(f"http://{host}:{port}", key=secret) as client:
            run_id = client.submit("streams", "tell").run_id
            events = [*client.events(run_id, text=True)]
            pieces = [event for event in events if event.kind == "text"]
            assert len(pieces) > 1 and text.endswith("".join(piece.data["text"] for piece in pieces))
            assert {(piece.data["step"], piece.data["attempt"], piece.id) for piece in pieces} == {("1:1", 1, 0)}
            kinds = [event.kind for event in events]
            assert kinds.index("step_committed") > max(place for place, kind in enumerate(kinds) if kind == "text")
            assert [event.kind for event in client.events(run_id)] == [kind for kind in kinds if kind != "text"]
        answer = served.admin.get(f"/v1/runs/{run_id}/events", params={"text": "perhaps"})
        assert answer.status_code == 422


def test_a_slow_reader_of_text_is_sent_the_latest_of_it() -> None:
    woken: list[int] = []
    texts = _Texts(lambda: woken.append(1))
    for number in range(100):
        texts.add(Streamed("run", "1:1", 1, f"{number:03}" + "x" * (TEXT_CHARS_MAX // 50)))
    texts.add(Streamed("run", "1:1", 2, "again"))
    assert texts._chars <= TEXT_CHARS_MAX and len(woken) == 101
    first, second = (msgspec.json.decode(event.split(b"data: ")[1]) for event in texts.take())
    assert first["cut"] and first["text"].endswith("x") and "099" in first["text"] and "000x" not in first["text"]
    assert second == {"step": "1:1", "attempt": 2, "text": "again"} and texts.take() == []


def test_answers_of_megabytes_take_no_turn_of_the_control_loop() -> None:
    with ModelServer() as server, node(server, stream=False) as runtime:
        text = "x" * 3_000_000
        server.script = [Reply(text=text, usage=(10, 100_000))] * 3
        before = runtime.loop_watch.long_turns
        for _ in range(3):
            assert len(runtime.submit_sync("ask", "long").result_sync(60)["text"]) == len(text)
        assert runtime.loop_watch.long_turns == before


def test_nobody_observes_and_nothing_is_told() -> None:
    with ModelServer() as server, node(server) as runtime:
        server.script = [Reply(text="quiet")]
        assert runtime.submit_sync("streams", "tell").result_sync(30) == "quiet"


def test_a_cancelled_run_closes_its_stream() -> None:
    with ModelServer() as server, node(server) as runtime:
        server.script = [Reply(text="word", endless=True, piece_delay=0.01)]
        run = runtime.submit_sync("streams", "tell")
        server.wait_for(lambda: bool(server.requests))
        run.cancel_sync("enough")
        with pytest.raises(RunCancelledError):
            run.result_sync(30)
        server.wait_for(lambda: server.requests[0].gave_up)
        assert runtime.statistics_sync().models.running == 0


def test_a_call_that_nobody_waits_for_any_more_is_stopped() -> None:
    with ModelServer() as server, node(server) as runtime:
        server.script = [Reply(text="word", endless=True, piece_delay=0.01)]
        assert runtime.submit_sync("impatient", 0.2).result_sync(30) == "gave up"
        server.wait_for(lambda: server.requests[0].gave_up)


def test_failures_are_typed() -> None:
    with ModelServer() as server, node(server) as runtime:
        server.script = [Reply(status=400)]
        assert runtime.submit_sync("fails", "work").result_sync(30) == ["model_refused", "fatal"]
        assert runtime.submit_sync("fails", "other").result_sync(30)[1] == "unknown_profile"
    with node(None) as runtime:
        assert runtime.submit_sync("fails", "work").result_sync(30)[1] == "unsupported"


def test_no_key_is_in_store_logs_or_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    key = "sk-very-secret-key"
    (tmp_path / "secrets").mkdir(mode=0o700)
    (tmp_path / "secrets" / "openai").write_text(key)
    (tmp_path / "secrets" / "openai").chmod(0o600)
    with ModelServer() as server:
        settings = server.config() | {"secrets.folder": str(tmp_path / "secrets")}
        settings["models.providers"]["server"]["api_key"] = "secret://openai"
        echo = json.dumps({"error": {"message": f"bad key {key}"}}).encode()
        server.script = [Reply(text="fine"), Reply(status=401, body=echo)]
        with Runtime(store=tmp_path / "store", config=load_config(env={}, arguments=settings)) as runtime:
            runtime.register_sync(agents.fails)
            runtime.register_sync(agents.ask)
            assert runtime.submit_sync("ask", "x").result_sync(30)["text"] == "fine"
            assert runtime.submit_sync("fails", "work").result_sync(30) == ["model_auth", "fatal"]
        assert server.requests[0].headers["Authorization"] == f"Bearer {key}"
    for file in (tmp_path / "store").rglob("*"):
        assert not file.is_file() or key.encode() not in file.read_bytes(), file
    assert key not in caplog.text
