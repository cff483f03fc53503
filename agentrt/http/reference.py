"""docs/http.md: what there is to say about the API, and the table of its endpoints."""

from typing import Final

from agentrt.config import load_config
from agentrt.http.app import endpoint_table, streams_of
from agentrt.http.endpoint import Endpoint
from agentrt.http.keys import SCOPES, KeyRing
from agentrt.http.problems import RETRY_AFTER_S, STATUS
from agentrt.runtime import Runtime

_ABOUT: Final = """\
`agentrt serve` ([operations.md](operations.md)) answers under `/v1`, in JSON. `GET /v1/openapi.json` is the OpenAPI
3.1 document, made from the same table as this page. Times are Unix seconds. Members of a request that are not known
are refused.

```python
# client.py
import os

from agentrt import Client

with Client(os.environ["AGENTRT_URL"], key=os.environ["AGENTRT_KEY"]) as client:
    accepted = client.submit("refunds", {"order": "A1", "cents": 4200}, idempotency_key="order A1")
    for event in client.events(accepted.run_id):
        print(event.id, event.kind)
    print(client.run(accepted.run_id).state)
```

`agentrt.Client` and `agentrt.AsyncClient` have a method for every endpoint about runs, keys and the node. Without a
URL or a key (`Client()`) they take those of `AGENTRT_URL` and `AGENTRT_KEY`, as the commands do. They ask
again by the rules below: after Retry-After where the node refused, after a pause where the connection failed and
asking again is safe (runs carry an idempotency key, events an id). Errors are the classes of `agentrt.errors`.

## Keys

`Authorization: Bearer agentrt_…`. A key acts for one tenant, or for any (`*`); runs of others do not exist for it, to
the answer and to the time it takes. It has scopes and `max_tier`, the most urgent tier that its runs may have: an
agent of a more urgent one runs at that, and asking for more is 403. Make keys with `agentrt keys make` or `POST
/v1/keys`.

| scope | what it allows |
|---|---|
| `runs:read` | looking at runs, agents, schedules |
| `runs:write` | starting, cancelling, events, schedules |
| `runs:decide` | approvals, settling and repeating steps, letting runs go on |
| `node:read` | looking at queues and figures of the node: those of all tenants together, so it is for operators |
| `admin` | everything, keys and draining included |

## Starting a run

202 means that the run is durable. With an `Idempotency-Key` the same request of the same tenant gives the same run,
for as long as the run is kept; another agent or input under the key is 409. `?wait=SECONDS` (at most 60) waits for
the end of a run whose agent is declared short (`@agent(short=True)`, or in the node's settings): 200 with the run if
it has ended by then, else 202. A run that waits for a person is answered 202 at once. The time that
the node took, waiting included, is in the header Server-Timing (`total;dur=`, ms).

## Following a run

`GET /v1/runs/{run_id}/events` sends server-sent events, from the beginning or after `Last-Event-ID`, until the run
has ended. The id of an event is the number of its record in the journal, so nothing is missed and nothing comes
twice. A client that does not read is cut after 30 seconds and can go on where it was. There are at most
`http.streams_max` streams, and `http.streams_per_tenant_max` of a tenant (then 429).

## Callbacks

`callback_url` gets the run by POST, as `GET /v1/runs/{run_id}` shows it, when it has ended. Anything but 2xx,
redirects included, is repeated with growing pauses, 12 times within some eight hours; it may come more than once,
under the same `webhook-id`. The URL must be `https` and lead to public addresses only, unless
`http.callback_networks` has others.

Messages are signed as [standardwebhooks.com](https://www.standardwebhooks.com) has it; its libraries check them with
the secret of `GET /v1/callback-secret` (`agentrt keys callbacks`). `POST /v1/callback-secret/rotate` (`agentrt keys
callbacks --rotate`) makes a new one; for a day, or as long as you say, messages carry a signature of the old one as
well. By hand:

```python
# verify.py
import base64
import hashlib
import hmac
import time


def is_genuine(secret: str, headers: dict[str, str], body: bytes) -> bool:
    if abs(time.time() - int(headers["webhook-timestamp"])) > 300:
        return False
    key = base64.b64decode(secret.removeprefix("whsec_"))
    signed = f"{headers['webhook-id']}.{headers['webhook-timestamp']}.".encode() + body
    wanted = "v1," + base64.b64encode(hmac.new(key, signed, hashlib.sha256).digest()).decode()
    return any(hmac.compare_digest(wanted, given) for given in headers["webhook-signature"].split())
```

## Errors

Problem+JSON (RFC 9457) with `code`, the error's stable name, and where known `run`, `step`, `limit` and `hint`. Codes
that are not in the table have the status of the kind of error they are.
"""


def page(generated: str) -> str:
    """The page; ``generated`` says that it is."""
    runtime = Runtime(config=load_config(env={}, arguments={"store.kind": "memory"}))
    table = endpoint_table(runtime, KeyRing(runtime), streams_of(runtime.config.http))
    by_status: dict[int, list[str]] = {}
    for code, status in STATUS.items():
        by_status.setdefault(status, []).append(code)
    rows = [
        f"| {status} | {', '.join(f'`{code}`' for code in sorted(codes))} | {_again(status)} |"
        for status, codes in sorted(by_status.items())
    ]
    lines = ["# HTTP API", "", generated, "", *_ABOUT.splitlines(), ""]
    lines += ["| status | codes | ask again |", "|---|---|---|", *rows, "", "## Endpoints", ""]
    for endpoint in table:
        lines += _described(endpoint)
    unused = set(SCOPES) - {e.scope for e in table}
    assert not unused, unused
    return "\n".join(lines).rstrip() + "\n"


def _again(status: int) -> str:
    if status in RETRY_AFTER_S:
        return "after Retry-After"
    return ""


def _described(endpoint: Endpoint) -> list[str]:
    lines = [f"### {endpoint.method} {endpoint.path}", "", endpoint.about, ""]
    facts = [f"scope `{endpoint.scope}`" if endpoint.scope else "no key needed"]
    if endpoint.body is not None:
        facts.append(f"takes `{endpoint.body.__name__}`{' (optional)' if endpoint.body_optional else ''}")
    gives = endpoint.answer.__name__ if endpoint.answer is not None else None
    facts.append(f"{endpoint.status}{f' with `{gives}`' if gives else ''}")
    lines += ["; ".join(facts) + ".", ""]
    lines += [f"- `{p.name}` ({p.where}, {p.kind}): {p.about}" for p in endpoint.parameters]
    return [*lines, ""] if endpoint.parameters else lines
