"""The dashboard in a browser, against a node under load: figures that move, used by keyboard, read by a screen reader,
nothing from elsewhere, and names that are markup shown as text."""

import itertools
import json
import shutil
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from serve_kit import AGENTS, Serving

from agentrt.http.dashboard import dashboard_routes

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
BROWSER = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), ""
)
pytestmark = [
    pytest.mark.skipif(not BROWSER, reason="there is no Chromium here"),
    pytest.mark.timeout(300),
]
HOG = Path(__file__).parents[2] / "examples" / "guests" / "hog.wasm"
EVIL = "<img src=x onerror=\"document.title='owned'\">"
PROFILES = """
[base.limits]
"tenant:*" = { "tool_calls/day" = 100_000 }

[profiles.lean.limits]
"tenant:*" = { "tool_calls/day" = 50_000 }
"""
SETTINGS = """
[node]
load = ["{agents}"]
[node.agents.hog]
source = "{hog}"
tier = 3
[flow]
file = "{flow}"
[slo.targets.urgent]
tier = 0
latency_ms = 60000
"""


class Load(threading.Thread):
    """Urgent runs one after the other, of many tenants, beside hogs, until it is told to stop."""

    def __init__(self, node: Serving) -> None:
        super().__init__(daemon=True)
        self.over = threading.Event()
        self.done = 0
        self._http = httpx.Client(base_url=node.url, headers={"authorization": f"Bearer {node.key}"}, timeout=60)

    def run(self) -> None:
        for _ in range(4):
            self._post({"agent": "hog", "input": {}, "fuel": 10**12})
        while not self.over.is_set():
            made = self._post({"agent": "greet", "input": "Ada", "tier": 0, "tenant": EVIL}, wait=30)
            assert made["state"] == "SUCCEEDED", made
            self.done += 1

    def _post(self, body: dict[str, Any], **query: Any) -> Any:
        answer = self._http.post("/v1/runs", json=body, params=query)
        assert answer.status_code in (200, 202), answer.text
        return answer.json()


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("node")
    (folder / "flow.toml").write_text(PROFILES)
    settings = SETTINGS.format(agents=AGENTS, hog=HOG, flow=folder / "flow.toml")
    with Serving(folder, settings) as node:
        load = Load(node)
        load.start()
        yield node
        load.over.set()
        load.join(60)
        assert load.done > 5


class Looked:
    """A page, and what happened on it that should not."""

    def __init__(self, page: Any, node: Serving) -> None:
        self.page = page
        self.errors: list[str] = []
        self.hosts: set[str] = set()
        page.on("console", lambda message: message.type == "error" and self.errors.append(message.text))
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("request", lambda request: self.hosts.add(request.url.split("/")[2]))
        page.goto(node.url + "/")

    def connect(self, key: str) -> None:
        """By keyboard only."""
        self.page.keyboard.press("Tab")
        assert self.focused() == "Skip to the figures"
        self.page.keyboard.press("Tab")
        self.page.keyboard.type(key)
        self.page.keyboard.press("Enter")

    def focused(self) -> str:
        text: str = self.page.evaluate("document.activeElement.textContent.trim()")
        return text


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        # Without its own sandbox, which needs namespaces that a container may not have; it sees one page, ours.
        browser = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


@pytest.fixture
def looked(browser: Any, node: Serving) -> Iterator[Looked]:
    context = browser.new_context()
    context.set_default_timeout(60_000)
    found = Looked(context.new_page(), node)
    yield found
    context.close()


@pytest.fixture
def connected(looked: Looked, node: Serving) -> Looked:
    looked.connect(node.key)
    looked.page.get_by_role("status").filter(has_text="Connected").first.wait_for()
    return looked


def wait_for(page: Any, what: str) -> None:
    """Until the expression is true. Playwright's own way makes code of text, which the page's policy forbids."""
    end_s = time.monotonic() + 60
    while not page.evaluate(what):
        assert time.monotonic() < end_s, what
        page.wait_for_timeout(50)


CELL = "document.querySelector('#tiers tbody tr:nth-child({tier}) :nth-child({column})')?.textContent"


def test_figures_of_a_node_under_load_move(connected: Looked, node: Serving) -> None:
    page = connected.page
    succeeded = CELL.format(tier=1, column=8)
    wait_for(page, f"parseInt({succeeded}) > 0")
    first = int(page.evaluate(succeeded).replace(",", ""))
    wait_for(page, f"parseInt(({succeeded}).replaceAll(',', '')) > {first}")
    assert page.evaluate(CELL.format(tier=1, column=1)) == "0 critical"
    wait_for(page, "document.querySelectorAll('#urgent rect.t0[height]:not([height=\"0\"])').length > 0")
    wait_for(page, "document.getElementById('urgent-text').textContent.includes('99 % below')")
    wait_for(page, "document.querySelectorAll('#workers svg rect.t3, #workers svg rect.t0').length > 0")
    assert "preemptions" in page.locator("#workers svg").first.get_attribute("aria-label")
    told = "[...document.querySelectorAll('#workers svg.slices title')].map(each => each.textContent)"
    wait_for(page, f"{told}.some(text => text.includes('preempted: run_'))")
    wait_for(page, f"{told}.some(text => text.startsWith('critical'))")
    assert "Last second: " in page.locator("#workers svg.slices").first.get_attribute("aria-label")
    wait_for(page, "document.querySelector('#targets tbody').textContent.includes('urgent')")
    wait_for(page, "document.querySelector('#budgets tbody').textContent.includes('tool_calls/day')")
    assert connected.errors == [] and connected.hosts == {node.url.split("/")[2]}


def test_a_run_is_found_and_looked_at_by_keyboard(connected: Looked) -> None:
    page = connected.page
    wait_for(page, "document.querySelectorAll('#runs tbody button').length > 0")
    page.get_by_role("combobox", name="State").select_option("SUCCEEDED")
    page.get_by_role("searchbox", name="Run, agent or reason").focus()
    page.keyboard.type("greet")
    page.keyboard.press("Enter")
    wait_for(page, "[...document.querySelectorAll('#runs tbody tr')].every(r => r.textContent.includes('SUCCEEDED'))")
    # At once, for the list goes on until something of it has the focus.
    run_id = page.evaluate(
        "(() => { const it = document.querySelector('#runs tbody button'); it.focus(); return it.textContent })()"
    )
    page.keyboard.press("Enter")
    page.get_by_role("heading", name=run_id).wait_for()
    assert connected.focused() == run_id
    assert "tool.call" in page.locator("#steps").text_content()
    assert page.locator("#runs tbody button").first.text_content() == run_id, "it stands still while it is used"
    assert EVIL in page.locator("#run-facts").text_content(), "names are text"
    page.keyboard.press("Escape")
    assert connected.focused() == run_id and page.locator("#run").is_hidden()
    assert page.title() == "agentrt" and page.locator("main img").count() == 0
    assert connected.errors == []


def test_the_newest_runs_are_shown_as_they_come(connected: Looked) -> None:
    page = connected.page
    wait_for(page, "document.querySelectorAll('#runs tbody button').length > 0")
    first = page.evaluate("document.querySelector('#runs tbody button').textContent")
    wait_for(page, f"document.querySelector('#runs tbody button').textContent > '{first}'")
    ids = page.evaluate("[...document.querySelectorAll('#runs tbody button')].map(found => found.textContent)")
    assert ids == sorted(ids, reverse=True)
    page.get_by_role("searchbox", name="Run, agent or reason").fill("hog")  # behind all of the others
    page.get_by_role("button", name="Search").click()
    wait_for(page, "[...document.querySelectorAll('#runs tbody tr')].every(r => r.textContent.includes('hog'))")
    assert page.locator("#runs tbody tr").count() == 4
    assert connected.errors == []


def test_nothing_is_wider_than_a_telephone(connected: Looked) -> None:
    connected.page.set_viewport_size({"width": 390, "height": 800})
    assert connected.page.evaluate("document.documentElement.scrollWidth") <= 390


def test_a_lost_node_is_said_with_the_age_of_the_figures(browser: Any, tmp_path: Path) -> None:
    context = browser.new_context()
    with Serving(tmp_path, f'[node]\nload = ["{AGENTS}"]\n') as node:
        found = Looked(context.new_page(), node)
        assert found.page.locator("#hello").is_visible() and found.page.get_by_role("table").count() == 0
        found.connect(node.key)
        found.page.get_by_role("status").filter(has_text="Connected").first.wait_for()
        assert found.page.locator("#hello").is_hidden() and not found.page.locator("body.stale").count()
        node.process.kill()
        found.page.get_by_role("status").filter(has_text="No connection").filter(has_text="Figures are of").wait_for()
        assert found.page.locator("body.stale").count() == 1
    context.close()


def test_a_profile_is_applied_and_rolled_back(connected: Looked) -> None:
    page = connected.page
    page.get_by_role("button", name="Apply lean").click()
    page.get_by_role("button", name="Roll back lean").wait_for()
    wait_for(page, "document.querySelector('#budgets tbody').textContent.includes('50,000')")
    page.get_by_role("button", name="Roll back lean").click()
    page.get_by_role("button", name="Apply lean").wait_for()
    assert connected.errors == []


def test_a_key_that_may_not_look_is_told_so(looked: Looked, node: Serving) -> None:
    admin = {"authorization": f"Bearer {node.key}"}
    made = httpx.post(
        f"{node.url}/v1/keys", headers=admin, json={"tenant": "acme", "scopes": ["runs:read"]}, timeout=60
    )
    looked.connect(made.json()["secret"])
    looked.page.get_by_role("status").filter(has_text="lacks the scope node:read").first.wait_for()


def test_a_tenant_does_not_see_what_others_use(node: Serving) -> None:
    admin = {"authorization": f"Bearer {node.key}"}
    asked = {"tenant": "acme", "scopes": ["node:read"]}
    key = httpx.post(f"{node.url}/v1/keys", headers=admin, json=asked, timeout=60).json()["secret"]
    for secret, sees in ((node.key, True), (key, False)):
        (sample,) = live(node, secret, 1)
        names = {budget["tenant"] for budget in sample["flow"]["budgets"]}
        assert (EVIL in names) is sees
        assert sees or names <= {"acme"}
        runs = {slice["run"] for worker in sample["workers"] for slice in worker["last"]}
        assert any(runs) is sees, runs  # hogs have the slots; whose runs they are is the operator's to know


def live(node: Serving, key: str, count: int) -> list[Any]:
    """The next samples of the stream."""
    found: list[Any] = []
    with httpx.stream("GET", f"{node.url}/v1/live", headers={"authorization": f"Bearer {key}"}, timeout=60) as stream:
        assert stream.status_code == 200
        for line in stream.iter_lines():
            if line.startswith("data: "):
                found.append(json.loads(line[6:]))
                if len(found) == count:
                    break
    return found


def test_all_who_look_share_one_sample_a_second(node: Serving) -> None:
    with ThreadPoolExecutor(3) as several:
        streams = [found.result() for found in [several.submit(live, node, node.key, 4) for _ in range(3)]]
    times = [[sample["at"] for sample in samples] for samples in streams]
    for each in times:
        assert all(later - at > 0.9 for at, later in itertools.pairwise(each)), each
    assert len({at for each in times for at in each}) <= 5
    for samples in streams:
        for at, later in itertools.pairwise(samples):
            assert all(a["picks"] <= b["picks"] for a, b in zip(at["tiers"], later["tiers"], strict=True))
            assert sum(b["picks"] - a["picks"] for a, b in zip(at["tiers"], later["tiers"], strict=True)) > 0


def test_it_is_accessible(connected: Looked) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe-playwright-python is not installed")
    page = connected.page
    wait_for(page, "document.querySelectorAll('#runs tbody button').length > 0")
    page.locator("#runs tbody button").first.click()
    page.locator("#run").wait_for()
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        found = axe.Axe().run(page)
        assert found.violations_count == 0, found.generate_report()


def test_the_page_says_what_it_may_load(node: Serving) -> None:
    for route in dashboard_routes():
        answer = httpx.get(node.url + route.path, timeout=60)
        assert answer.status_code == 200 and "default-src 'none'" in answer.headers["content-security-policy"]
        assert "http://" not in answer.text.replace("http://www.w3.org/2000/svg", "") and "https://" not in answer.text
        assert answer.headers["x-content-type-options"] == "nosniff"
