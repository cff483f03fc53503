// The dashboard. Everything that is shown is set as text, never as markup: names are others'.
"use strict";

const TIERS = ["critical", "interactive", "batch", "maintenance"];
const KEPT_S = 60;
const RETRY_MS = [500, 1000, 2000, 5000];
const LOOK_AGAIN_MS = 2000; // at the list of runs, at most so often
const SVG = "http://www.w3.org/2000/svg";
const $ = (id) => document.getElementById(id);

let key = sessionStorage.getItem("agentrt-key") || "";
let life = 0; // of the stream: a newer one ends the older
let samples = []; // the last minute
let cursor = null;
let opener = null; // what had the focus before a run was opened
let shownProfiles = "";
let shownRuns = null; // what the list was asked for, while it shows the newest
let openRun = null; // the id of the run that is open and has not ended
let counted = ""; // runs accepted, ended and in memory when the list was asked for
let asking = false;

// --- forms of figures ------------------------------------------------------------

const number = (value) => value.toLocaleString("en", { maximumFractionDigits: value < 10 ? 1 : 0 });
const share = (value) => (value === null ? "–" : (100 * value).toFixed(1) + " %");
const when = (seconds) => new Date(seconds * 1000).toISOString().replace("T", " ").slice(0, 19);

function time(ns) {
  if (ns === null || ns === undefined) return "–";
  for (const [unit, factor] of [["ns", 1], ["µs", 1e3], ["ms", 1e6]])
    if (ns < 1000 * factor) return (ns / factor).toPrecision(3) + " " + unit;
  return number(ns / 1e9) + " s";
}

function quantile(bounds, counts, q) {
  const all = counts.reduce((a, b) => a + b, 0);
  if (!all) return null;
  let left = q * all;
  let low = 0;
  for (let i = 0; i < bounds.length; i++) {
    if (counts[i] && left <= counts[i]) return low + ((bounds[i] - low) * left) / counts[i];
    left -= counts[i];
    low = bounds[i];
  }
  return low;
}

// --- elements ----------------------------------------------------------------------

function made(name, text, more = {}) {
  const found = document.createElement(name);
  if (text !== undefined) found.textContent = text;
  return Object.assign(found, more);
}

function rows(table, lines, empty) {
  const body = $(table).tBodies[0];
  body.replaceChildren(
    ...lines.map((cells) => {
      const row = made("tr");
      cells.forEach((cell, i) => {
        const found = i ? made("td") : made("th", undefined, { scope: "row" });
        found.append(cell instanceof Node ? cell : String(cell));
        row.append(found);
      });
      return row;
    }),
  );
  if (!lines.length) {
    const row = made("tr");
    row.append(made("td", empty, { colSpan: $(table).tHead.rows[0].cells.length }));
    body.append(row);
  }
}

function facts(list, pairs) {
  $(list).replaceChildren(
    ...pairs.map(([name, value]) => {
      const pair = made("div");
      pair.append(made("dt", name), made("dd", String(value)));
      return pair;
    }),
  );
}

function shape(name, attributes) {
  const found = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) found.setAttribute(key, value);
  return found;
}

// --- the API -----------------------------------------------------------------------

async function ask(path, options = {}) {
  const answer = await fetch(path, { ...options, headers: { authorization: "Bearer " + key }, cache: "no-store" });
  if (answer.ok) return answer;
  let why = answer.status + " " + answer.statusText;
  try {
    const problem = await answer.json();
    why = problem.detail + (problem.hint ? " (" + problem.hint + ")" : "");
  } catch {
    // not a problem of the API's: the status has to do
  }
  throw Object.assign(new Error(why), { status: answer.status });
}

function status(text, fresh = false) {
  document.body.classList.toggle("stale", !fresh && samples.length > 0);
  if ($("status").textContent !== text) $("status").textContent = text; // said once by a screen reader
}

const asOf = () => (samples.length ? " Figures are of " + when(samples[samples.length - 1].at).slice(11) + " UTC." : "");

async function follow() {
  const mine = ++life;
  for (let failures = 0; mine === life && key; failures++) {
    try {
      if (!failures) status("Connecting");
      const answer = await ask("/v1/live");
      const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
      let rest = "";
      for (;;) {
        const { value, done } = await reader.read();
        if (mine !== life) {
          reader.cancel();
          return;
        }
        if (done) break;
        const blocks = (rest + value).split("\n\n");
        rest = blocks.pop();
        for (const block of blocks) {
          const data = block.split("\n").filter((line) => line.startsWith("data: "));
          if (data.length) {
            failures = 0;
            show(JSON.parse(data.map((line) => line.slice(6)).join("\n")));
          }
        }
      }
      status("The node has ended the stream; trying again." + asOf());
    } catch (error) {
      if (mine !== life) return;
      if (error.status === 401 || error.status === 403) {
        status("Refused: " + error.message);
        return;
      }
      status("No connection; trying again." + asOf());
    }
    await new Promise((done) => setTimeout(done, RETRY_MS[Math.min(failures, RETRY_MS.length - 1)]));
  }
}

// --- figures -----------------------------------------------------------------------

function show(now) {
  const last = samples[samples.length - 1];
  const restarted = last && now.tiers.some((tier, i) => tier.picks < last.tiers[i].picks);
  if (restarted) samples = [];
  samples.push(now);
  while (samples.length > KEPT_S + 1) samples.shift();
  const before = samples[Math.max(0, samples.length - 2)];
  const seconds = Math.max(0.001, now.at - before.at);
  status(
    !now.answers ? "The control loop does not answer." + asOf() : now.accepting ? "Connected" : "Connected: the node drains",
    now.answers,
  );
  $("main").classList.remove("unknown");
  facts("node", [
    ["Runs in memory", number(now.live)],
    ["Waiting for an operator", number(now.parked)],
    ["To be brought back", number(now.recovering)],
    ["Stuck, found", number(now.stuck)],
    ["Loop's last sign of life", now.heartbeat_age_ms + " ms ago"],
    ["Long turns", number(now.long_turns)],
    ["Tool calls", number(now.tool_calls)],
    ["Failed", number(now.tool_failures)],
    ["Cost", "$" + (now.cost_micro_usd / 1e6).toFixed(2)],
    ["Tokens", number(now.tokens)],
  ]);
  showTiers(now, before, seconds);
  showUrgent(now);
  showWorkers(now);
  rows(
    "targets",
    now.targets.map((target) => {
      const attained = target.runs ? target.good / target.runs : null;
      const met = attained === null ? "–" : attained >= target.objective ? "yes" : "no";
      const mark = made("span", met, { className: met === "yes" ? "good" : met === "no" ? "bad" : "" });
      return [target.name, time(target.latency_ms * 1e6), share(target.objective), share(attained), number(target.runs), mark];
    }),
    "No targets are configured.",
  );
  showFlow(now.flow);
  lookAgain(now);
}

// The newest runs, and the one that is open, change with the node's figures.
let lookedAt = 0;
function lookAgain(now) {
  const counts = JSON.stringify(now.tiers.map((tier) => [tier.accepted, tier.ended, tier.queued]).concat(now.live, now.parked));
  if (counts === counted || asking || document.hidden || Date.now() - lookedAt < LOOK_AGAIN_MS) return;
  counted = counts;
  lookedAt = Date.now();
  const used = !$("run").hidden || $("runs").contains(document.activeElement) || $("runs").matches(":hover");
  if (shownRuns !== null && !used) look(shownRuns, "", true); // what somebody is about to take stands still
  if (openRun !== null) showRun(openRun);
}

function waits(now, tier) {
  const first = samples[0];
  return now.tiers[tier].waits.map((count, i) => (first === now ? count : count - first.tiers[tier].waits[i]));
}

function showTiers(now, before, seconds) {
  rows(
    "tiers",
    now.tiers.map((tier, i) => {
      const counts = waits(now, i);
      const slots = (tier.slot_ns - before.tiers[i].slot_ns) / 1e9 / seconds / Math.max(1, now.workers.length);
      const ended = Object.values(tier.ended).reduce((a, b) => a + b, 0);
      const succeeded = tier.ended.SUCCEEDED || 0;
      return [
        i + " " + TIERS[i],
        number(tier.queued),
        number((tier.picks - before.tiers[i].picks) / seconds),
        share(Math.min(1, slots)),
        time(quantile(now.wait_bounds_ns, counts, 0.5)),
        time(quantile(now.wait_bounds_ns, counts, 0.99)),
        number(tier.accepted),
        number(succeeded),
        number(ended - succeeded),
        ...tier.run_ms.map((ms) => time(ms === null ? null : ms * 1e6)),
      ];
    }),
  );
}

function showUrgent(now) {
  const counts = waits(now, 0);
  const bounds = now.wait_bounds_ns;
  const most = Math.max(1, ...counts);
  const width = 560 / counts.length;
  $("urgent").replaceChildren(
    ...counts.map((count, i) => {
      const height = count ? Math.max(2, (130 * Math.log1p(count)) / Math.log1p(most)) : 0;
      const bar = shape("rect", { class: "t0", x: i * width + 1, y: 140 - height, width: width - 2, height });
      const title = shape("title", {});
      title.textContent = (i < bounds.length ? "below " + time(bounds[i]) : "more") + ": " + number(count);
      bar.append(title);
      return bar;
    }),
  );
  const all = counts.reduce((a, b) => a + b, 0);
  $("urgent-text").textContent = all
    ? `${number(all)} waits: half below ${time(quantile(bounds, counts, 0.5))}, 99 % below ${time(quantile(bounds, counts, 0.99))}. ` +
      "Each bar is twice as long a wait as the one before, from 1 µs to 69 s; heights are logarithmic."
    : "No urgent work.";
}

function showWorkers(now) {
  const panel = $("workers");
  while (panel.children.length > now.workers.length) panel.lastChild.remove();
  now.workers.forEach((worker, w) => {
    if (!panel.children[w]) {
      const box = made("div", undefined, { className: "worker" });
      const picture = (height) =>
        shape("svg", { role: "img", viewBox: `0 0 ${KEPT_S * 10} ${height}`, preserveAspectRatio: "none" });
      box.append(made("p"), picture(50), made("p"), picture(20));
      box.children[3].classList.add("slices");
      panel.append(box);
    }
    const [text, picture, lastText, lastPicture] = panel.children[w].children;
    const shapes = [];
    for (let i = 1; i < samples.length; i++) {
      const [from, to] = [samples[i - 1], samples[i]];
      if (!from.workers[w] || !to.workers[w]) continue;
      const x = (KEPT_S - samples.length + i) * 10;
      let y = 50;
      const spent = to.workers[w].slot_ns.map((ns, tier) => ns - from.workers[w].slot_ns[tier]);
      // A slice that began before counts where it ends; a column is never more than full.
      const full = Math.max((to.at - from.at) * 1e9, spent.reduce((a, b) => a + b, 0), 1);
      spent.forEach((ns, tier) => {
        const height = (44 * ns) / full;
        y -= height;
        if (height > 0.05) shapes.push(shape("rect", { class: "t" + tier, x, y, width: 9, height }));
      });
      if (to.workers[w].preemptions > from.workers[w].preemptions)
        shapes.push(shape("rect", { class: "pre", x: x + 2, y: 0, width: 5, height: 4 }));
    }
    picture.replaceChildren(...shapes);
    const first = samples[0].workers[w] || worker;
    const spent = worker.slot_ns.map((ns, tier) => (ns - first.slot_ns[tier]) / 1e9);
    const said =
      `Slot ${w}: ` + spent.map((s, tier) => `${TIERS[tier]} ${s.toFixed(1)} s`).join(", ") +
      `; ${number(worker.preemptions - first.preemptions)} preemptions, ${number(worker.slices - first.slices)} slices`;
    text.textContent = said;
    picture.setAttribute("aria-label", said);
    showSlices(worker, lastText, lastPicture);
  });
}

// The last second of a slot, slice by slice: as wide as it took, with a mark where it gave way.
function showSlices(worker, text, picture) {
  const scale = (KEPT_S * 10) / 1e6;
  const shapes = [];
  for (const slice of worker.last) {
    const x = slice.from_us * scale;
    const width = Math.max(0.5, slice.took_us * scale);
    const bar = shape("rect", { class: "t" + slice.tier, x, y: 4, width, height: 16 });
    const title = shape("title", {});
    const whose = slice.run || (slice.host ? "a host of Python agents or a program" : "a run that has ended");
    title.textContent = `${TIERS[slice.tier]}, ${time(slice.took_us * 1e3)}, ${slice.end}: ${whose}`;
    bar.append(title);
    shapes.push(bar);
    if (slice.end === "preempted") shapes.push(shape("rect", { class: "pre", x: x + width - 1, y: 0, width: 2, height: 4 }));
  }
  picture.replaceChildren(...shapes);
  const longest = Math.max(0, ...worker.last.map((slice) => slice.took_us));
  const gave = worker.last.filter((slice) => slice.end === "preempted").length;
  const left = worker.last_count > worker.last.length ? `, the longest ${number(worker.last.length)} are shown` : "";
  const said = worker.last_count
    ? `Last second: ${number(worker.last_count)} slices${left}; the longest ${time(longest * 1e3)}; ${number(gave)} gave way`
    : "Last second: no slices";
  text.textContent = said;
  picture.setAttribute("aria-label", said);
}

// --- flow control --------------------------------------------------------------------

function showFlow(flow) {
  rows(
    "budgets",
    flow.budgets.map((budget) => [
      budget.scope + (budget.name ? " " + budget.name : ""),
      budget.key,
      number(budget.used),
      number(budget.held),
      number(budget.limit),
      share(budget.limit ? (budget.used + budget.held) / budget.limit : 1),
    ]),
    "No limits are in force.",
  );
  rows(
    "breakers",
    flow.breakers.map((breaker) => [
      breaker.scope + " " + breaker.name,
      breaker.state.replace("_", " "),
      breaker.until_ns ? when(breaker.until_ns / 1e9) : "–",
    ]),
    "All are closed.",
  );
  const profiles = JSON.stringify([flow.known, flow.applied]);
  if (profiles === shownProfiles) return; // or the button that has the focus would go
  shownProfiles = profiles;
  const focused = document.activeElement.dataset ? document.activeElement.dataset.profile : undefined;
  const names = [...flow.applied, ...flow.known.filter((name) => !flow.applied.includes(name))];
  $("profiles").replaceChildren(
    ...names.map((name) => {
      const on = flow.applied.includes(name);
      const item = made("li", name + (on ? ": in force " : " "));
      const button = made("button", on ? "Roll back " + name : "Apply " + name, { type: "button" });
      button.dataset.profile = name;
      button.addEventListener("click", () => switchProfile(name, on));
      item.append(button);
      return item;
    }),
  );
  if (!names.length) $("profiles").append(made("li", "None is known; see flow.file in the settings."));
  if (focused) document.querySelector(`[data-profile="${CSS.escape(focused)}"]`)?.focus();
}

async function switchProfile(name, on) {
  try {
    await ask("/v1/profiles/" + encodeURIComponent(name), { method: on ? "DELETE" : "PUT" });
    $("profiles-status").textContent = name + (on ? " was rolled back." : " was applied.");
  } catch (error) {
    $("profiles-status").textContent = error.message;
  }
}

// --- runs ----------------------------------------------------------------------------

async function search(after) {
  const text = $("text").value.trim();
  if (/^run_[0-9A-Z]{26}$/i.test(text)) {
    open("run_" + text.slice(4).toUpperCase());
    return;
  }
  const query = new URLSearchParams({ limit: "50", newest_first: "true" });
  for (const [name, value] of [["state", $("state").value], ["tenant", $("tenant").value.trim()], ["text", text]])
    if (value) query.set(name, value);
  await look(String(query), after || "");
}

async function look(query, after, quiet) {
  asking = true;
  try {
    const page = await (await ask("/v1/runs?" + query + (after && "&after=" + after))).json();
    shownRuns = after ? null : query; // older ones stay as they are
    cursor = page.next || null;
    $("next").disabled = !cursor;
    rows(
      "runs",
      page.runs.map((run) => {
        const button = made("button", run.run_id, { type: "button", className: "link" });
        button.dataset.run = run.run_id;
        button.addEventListener("click", () => open(run.run_id));
        return [button, run.state, run.tier, run.agent, run.tenant, when(run.accepted_at), took(run), waitsFor(run)];
      }),
      cursor ? "None among these; the next page looks further back." : "No run is like that.",
    );
    if (!quiet) // a screen reader says it
      $("runs-status").textContent = `${number(page.runs.length)} runs, the newest first` + (cursor ? "; there are older ones" : "");
  } catch (error) {
    $("runs-status").textContent = error.message;
  } finally {
    asking = false;
  }
}

const took = (run) => (run.ended_at ? time((run.ended_at - run.accepted_at) * 1e9) : "–");

const waitsFor = (run) => (run.wait_reason ? run.wait_reason + (run.detail ? ": " + run.detail.slice(0, 120) : "") : "–");

const dollars = (micro) => "$" + (micro / 1e6).toFixed(6);

async function open(id) {
  opener = document.activeElement && document.activeElement.dataset.run ? id : null;
  if (!(await showRun(id))) return;
  $("run").hidden = false;
  $("h-run").focus();
}

// Whether it could be asked for.
async function showRun(id) {
  try {
    const [run, page] = await Promise.all([
      ask("/v1/runs/" + encodeURIComponent(id)).then((answer) => answer.json()),
      ask("/v1/runs/" + encodeURIComponent(id) + "/steps?limit=500").then((answer) => answer.json()),
    ]);
    openRun = run.ended_at ? null : run.run_id;
    const cost = run.cost || {};
    $("h-run").textContent = run.run_id;
    facts("run-facts", [
      ["State", run.state],
      ["Agent", run.agent],
      ["Tenant", run.tenant],
      ["Tier", run.tier + (run.tier === run.base_tier ? "" : ", asked for " + run.base_tier)],
      ["Accepted", when(run.accepted_at)],
      ["Ended", run.ended_at ? when(run.ended_at) : "–"],
      ["Waits for", waitsFor(run)],
      ["Fuel", number(cost.fuel || 0)],
      ["Slot time", time(cost.slot_ns || 0)],
      ["Money", dollars(cost.micro_usd || 0)],
      ["Tokens", number(cost.tokens || 0)],
      ["Budget", run.budget ? JSON.stringify(run.budget) : "none of its own"],
      ["Error", run.error ? run.error.message || JSON.stringify(run.error) : "–"],
    ]);
    rows(
      "steps",
      page.steps.map((step) => [
        step.path,
        step.op,
        step.tool || "–",
        step.state + (step.ok === false ? ", failed" : ""),
        step.attempt || 1,
        step.ended_at && step.started_at ? time((step.ended_at - step.started_at) * 1e9) : "–",
        step.cost_micro_usd ? dollars(step.cost_micro_usd) : "–",
      ]),
      "It has no steps in this segment.",
    );
    return true;
  } catch (error) {
    $("runs-status").textContent = error.message;
    return false;
  }
}

function close() {
  $("run").hidden = true;
  openRun = null;
  const button = opener && document.querySelector(`[data-run="${CSS.escape(opener)}"]`);
  (button || $("text")).focus(); // the list may have gone on
}

// --- beginning -----------------------------------------------------------------------

function begin() {
  samples = [];
  shownProfiles = counted = "";
  $("hello").hidden = Boolean(key);
  $("main").className = key ? "unknown keyed" : "unknown";
  if (!key) return;
  follow();
  search();
}

document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !$("run").hidden) close();
});
$("close").addEventListener("click", close);
$("next").addEventListener("click", () => search(cursor));
$("runs-form").addEventListener("submit", (event) => {
  event.preventDefault();
  search();
});
$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  key = $("key").value.trim();
  sessionStorage.setItem("agentrt-key", key); // gone with the tab
  $("key").value = "";
  begin();
});
$("forget").addEventListener("click", () => {
  key = "";
  life++;
  sessionStorage.removeItem("agentrt-key");
  begin();
  status("Not connected");
});
begin();
