"""Flow control of a node as operators see it: budgets, breakers and profiles, over HTTP and on the command line."""

from collections.abc import Iterator

import pytest
from serve_kit import Serving, agentrt, lines

from agentrt.client import Client
from agentrt.errors import ForbiddenError, InputError, QueueFullError, UnknownRunError

AGENTS = """
from agentrt import Context, agent, tool
from agentrt.errors import ToolUnavailableError

@tool(kind="keyed", attempts_max=1)
def gone(*, idempotency_key: str) -> None:
    raise ToolUnavailableError("the other side is down")

@tool(kind="pure")
def there() -> int:
    return 1

@agent
async def asks(ctx: Context, times: int) -> list[str]:
    found = []
    for _ in range(times):
        try:
            await ctx.tool(gone)
        except Exception as error:
            found.append(error.code)
    found.append(str(await ctx.tool(there)))
    return found
"""
LIMITS = """
[base.limits]
"node" = { "tool_calls" = 1_000 }
"tenant:*" = { "tool_calls/day" = 100 }

[profiles.lean.limits]
"tenant:*" = { "tool_calls/day" = 50 }
"""


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("node")
    (folder / "agents.py").write_text(AGENTS)
    (folder / "flow.toml").write_text(LIMITS)
    settings = f"""
[node]
load = ["{folder / "agents.py"}"]
[flow]
file = "{folder / "flow.toml"}"
breaker_failures = 2
breaker_open_ms = 300_000
[flow.tenants.hasty]
urgent_per_minute = 19
"""
    with Serving(folder, settings) as serving:
        yield serving


def tenant_key(node: Serving, tenant: str, max_tier: int = 1) -> str:
    with node.client() as admin:
        secret = admin.make_key(tenant, ["node:read", "runs:read", "runs:write"], max_tier=max_tier).secret
    assert isinstance(secret, str)
    return secret


def tenant_client(node: Serving, tenant: str) -> Client:
    return Client(node.url, key=tenant_key(node, tenant))


def test_budgets_breakers_and_what_a_tenant_sees_of_them(node: Serving) -> None:
    with tenant_client(node, "acme") as acme, tenant_client(node, "rival") as rival, node.client() as admin:
        asked = acme.submit("asks", 4).run_id
        codes = acme.result(asked)
        assert codes[-2:] == ["breaker_open", "1"]
        quiet = rival.submit("asks", 0).run_id
        assert rival.result(quiet) == ["1"]

        decided = acme.decisions(asked).decisions
        assert [each.action for each in decided if each.scope == "tool"][:2] == ["open", "refuse"]
        refused = decided[-1]
        assert (refused.control, refused.name, refused.step is not None) == ("breaker", "gone", True)
        assert refused.until is not None and refused.until > refused.at
        assert rival.decisions(quiet).decisions == []
        with pytest.raises(UnknownRunError):
            rival.decisions(asked)
        code, out, _ = agentrt(node, "runs", "show", asked, "--json")
        assert code == 0 and lines(out)[0]["decisions"][-1]["action"] == "refuse"
        assert "breaker" in agentrt(node, "runs", "show", asked)[1]

        (breaker,) = admin.breakers().breakers
        assert (breaker.scope, breaker.name, breaker.state) == ("tool", "gone", "open")
        with pytest.raises(ForbiddenError):
            acme.breakers()

        found = {(each.scope, each.name, each.key): each for each in admin.budgets().budgets}
        of_acme = found["tenant", "acme", "tool_calls/day"]
        assert (of_acme.held, of_acme.limit, of_acme.tenant) == (0, 100, "acme")
        assert of_acme.used == codes.count("tool_unavailable") + 1
        assert found["node", "", "tool_calls"].used == of_acme.used + 1
        assert {each.tenant for each in acme.budgets().budgets} == {"acme"}
        assert {each.tenant for each in rival.budgets().budgets} == {"rival"}

        code, out, _ = agentrt(node, "breakers", "--json")
        assert (code, [row["name"] for row in lines(out)]) == (0, ["gone"])
        assert "gone" in agentrt(node, "breakers")[1]
        code, out, _ = agentrt(node, "budgets", "--json")
        assert code == 0 and len(lines(out)) == len(found)
        assert "tenant acme" in agentrt(node, "budgets")[1]


def test_profiles_are_listed_with_who_put_them_there(node: Serving) -> None:
    with node.client() as admin, tenant_client(node, "acme") as acme:
        assert (admin.profiles().known, admin.profiles().applied) == (["lean"], [])
        assert agentrt(node, "profiles", "apply", "lean")[0] == 0
        found = acme.profiles()
        assert (found.applied, [(each.action, each.profile) for each in found.changes]) == (
            ["lean"],
            [("apply", "lean")],
        )
        assert found.changes[0].by == "made at the first start"
        assert {each.limit for each in admin.budgets().budgets if each.scope == "tenant"} == {50}
        assert "lean (in force)" in agentrt(node, "profiles", "ls")[1]
        with pytest.raises(ForbiddenError):
            acme.apply_profile("lean")
        with pytest.raises(InputError):
            admin.apply_profile("none")
        assert agentrt(node, "profiles", "rollback", "lean")[0] == 0
        assert admin.profiles().applied == []


def test_a_tenant_has_so_many_urgent_runs_a_minute(node: Serving) -> None:
    key = tenant_key(node, "hasty", 0)
    with Client(node.url, key=key) as patient, Client(node.url, key=tenant_key(node, "calm", 0)) as calm:
        with Client(node.url, key=key, attempts_max=1) as hasty:
            hasty.submit("asks", 0, tier=0)
            with pytest.raises(QueueFullError) as refused:
                hasty.submit("asks", 0, tier="urgent")
            assert refused.value.limit == "flow.urgent_per_minute"
            assert 0 < refused.value.retry_after_s <= 4
            hasty.submit("asks", 0, tier=1)
        calm.submit("asks", 0, tier=0)
        assert patient.result(patient.submit("asks", 0, tier=0).run_id) == ["1"]  # asked again when there was another
