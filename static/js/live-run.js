// A live run: starts from what the server drew, applies the log's events on top. Applying an event twice changes nothing.

import { drawPost } from "./board.js";
import { $, $$, announce, atEnd, fmt, icon, readJson } from "./dom.js";
import { RunFeed } from "./run-socket.js";

const root = $("#run");
const state = readJson("run-state");
const words = readJson("state-words");
const candidates = new Map(state.candidates.map((c) => [c.artifact_hash, c]));
const proposals = new Map((state.proposals || []).map((p) => [p.id, p]));
const FOCI = ["attention", "projections", "cache", "scheduling", "fusion"];
let run = { ...state.run };
let phase = state.last_phase || run.phase;
let progress = state.progress || {};
let progressAt = Date.now();
const live = () => run.state === "queued" || run.state === "running";

// ---- parts ----
function chip(value) {
  const known = words.states[value] || { icon: "dot", word: String(value).replaceAll("_", " "), tone: "" };
  const span = document.createElement("span");
  span.className = `state ${known.tone}`;
  span.append(icon(known.icon), known.word);
  return span;
}
const slot = (node, name) => $(`[data-f=${name}]`, node);
const candidateUrl = (hash) => root.dataset.candidate.replace("HASH", hash);

// ---- head: phases, numbers ----
function showPhases() {
  const items = $$("#phases li");
  const at = Math.max(0, items.findIndex((li) => li.dataset.phase === phase));
  const good = run.state === "succeeded" || run.state === "no_gain";
  items.forEach((li, i) => {
    let now = i < at ? "done" : i === at ? "current" : "todo";
    if (good) now = i <= at || run.state === "succeeded" ? "done" : "skipped";
    else if (!live()) now = i < at ? "done" : i === at ? (run.state === "failed" ? "failed" : "skipped") : "skipped";
    li.dataset.state = now;
    if (now === "current") li.setAttribute("aria-current", "step"); else li.removeAttribute("aria-current");
    $("[data-phase-word]", li).textContent = ` (${{ done: "done", current: "now", todo: "to come", failed: "failed", skipped: "not reached" }[now]})`;
  });
}

const stat = (name, text) => {
  const element = $(`[data-stat=${name}]`);
  if (element.textContent !== text) element.textContent = text;
};
function showNumbers() {
  const counts = progress.counts || {};
  stat("measured", String(counts.tier1 ?? 0));
  stat("tiers", `${counts.tier2 ?? 0} whole model, ${counts.verified ?? 0} verified`);
  stat("predicted", String(counts.predicted ?? 0));
  stat("failed", String(counts.failed ?? 0));
  const hour = typeof progress.per_hour === "object" ? progress.per_hour?.tier1 : progress.per_hour;
  stat("per_hour", hour == null ? "–" : String(Math.round(hour)));
  stat("utilisation", fmt.percent(progress.utilisation));
  showClock();
}
function showClock() {
  const since = live() && run.state === "running" ? (Date.now() - progressAt) / 1000 : 0;
  const elapsed = (progress.elapsed_s ?? run.elapsed_s ?? 0) + since;
  stat("elapsed", fmt.duration(elapsed));
  $("#bar").value = Math.min(elapsed, $("#bar").max);
  if (!live()) { stat("eta", "–"); return; }
  const left = [progress.eta_low_s, progress.eta_high_s].map((s) => (s == null ? null : Math.max(0, s - since)));
  stat("eta", left[0] == null ? "–" : `${fmt.duration(left[0])} – ${fmt.duration(left[1])}`);
}

// ---- candidates ----
function showCandidate(c) {
  const id = `cand-${c.artifact_hash.slice(0, 16)}`;
  let row = document.getElementById(id);
  if (!row) {
    row = $("#row-template").content.querySelector("tr").cloneNode(true);
    row.id = id;
    slot(row, "name").href = candidateUrl(c.artifact_hash);
    $("#cand-body").append(row);
    $("#cand-empty").hidden = true;
    $("#cand-count").textContent = String(candidates.size);
  }
  slot(row, "name").textContent = c.name;
  slot(row, "mechanism").textContent = c.mechanism || "";
  const tag = Object.assign(document.createElement("span"), { className: `tag focus-tag ${c.focus || "other"}`, textContent: c.focus || "other" });
  slot(row, "focus").replaceChildren(tag);
  slot(row, "state").replaceChildren(chip(c.state || (c.predicted != null ? "queued" : "built")));
  slot(row, "tier").textContent = c.tier ?? "–";
  slot(row, "predicted").textContent = fmt.times(c.predicted);
  slot(row, "provenance").textContent = (words.provenances[c.provenance] || "").replace("{seen}", Math.round(c.seen ?? 0));
  slot(row, "measured").textContent = c.ratio == null ? "" : "measured";
  slot(row, "ratio").textContent = fmt.times(c.ratio);
  slot(row, "interval").textContent = fmt.interval(c.ci_low, c.ci_high) || "–";
  document.dispatchEvent(new Event("rowschanged"));
}
function upsert(hash, changes) {
  const known = candidates.get(hash) || { artifact_hash: hash, name: hash.slice(0, 8) };
  const found = Object.fromEntries(Object.entries(changes).filter(([, v]) => v !== undefined));
  candidates.set(hash, { ...known, ...found });
  showCandidate(candidates.get(hash));
}

// ---- charts: trace 0 is the best-so-far line, then one trace for each focus and one for the rest ----
let best = (state.experiments || []).filter((e) => e.tier >= 2 && e.ratio != null && (e.state === "keep" || e.state === "marginal")).reduce((most, e) => Math.max(most, e.ratio), 1);
let order = (state.experiments || []).filter((e) => e.ratio != null).length;
async function drawExperiment(e) {
  const figure = $('plot-figure[data-name="progress"]');
  if (!figure || e.ratio == null) return;
  order += 1;
  const focus = FOCI.includes(e.focus) ? e.focus : "other";
  const symbols = { attention: "circle", projections: "square", cache: "diamond", scheduling: "triangle-up", fusion: "triangle-down", other: "cross" };
  const low = e.ci_low ?? e.ratio, high = e.ci_high ?? e.ratio;
  const index = 1 + (focus === "other" ? FOCI.length : FOCI.indexOf(focus));
  addRow(figure, [order, e.name, focus, e.mechanism || "", e.tier, e.state, e.ratio, low, high]);
  await figure.extend(index, {
    x: order, y: e.ratio, customdata: [e.name, low, high, e.tier, e.state, e.artifact_hash],
    "marker.symbol": symbols[focus] + (e.tier === 1 ? "-open" : ""), "error_y.array": high - e.ratio, "error_y.arrayminus": e.ratio - low,
  });
  if (e.tier >= 2 && e.ratio > best && (e.state === "keep" || e.state === "marginal")) best = e.ratio;
  await figure.extend(0, { x: order, y: best });
}
function addRow(figure, row) {
  const shown = row.map((v) => (typeof v === "number" && !Number.isInteger(v) ? Number(v.toFixed(4)) : v));
  figure.payload?.rows.push(shown);
  const tr = document.createElement("tr");
  for (const value of shown) tr.append(Object.assign(document.createElement("td"), { textContent: value ?? "–" }));
  $("tbody", figure.closest(".chart"))?.append(tr);
}

// ---- log ----
const log = $("#log"), follow = $("#follow");
let following = !location.hash.startsWith("#log-");
function setFollow(on) {
  following = on;
  follow.setAttribute("aria-pressed", String(on));
  follow.classList.toggle("primary", on);
  if (on) log.scrollTop = log.scrollHeight;
}
follow.addEventListener("click", () => setFollow(!following));
log.addEventListener("wheel", () => { if (following && !atEnd(log)) setFollow(false); }, { passive: true });
function drawLog(seq, at, level, text) {
  if (document.getElementById(`log-${seq}`)) return;
  const line = Object.assign(document.createElement("li"), { id: `log-${seq}`, className: level });
  const link = Object.assign(document.createElement("a"), { href: `#log-${seq}`, textContent: seq });
  link.setAttribute("aria-label", `Line ${seq}`);
  line.append(link, Object.assign(document.createElement("time"), { textContent: fmt.clock(at), dateTime: new Date(at * 1000).toISOString() }), Object.assign(document.createElement("span"), { textContent: text }));
  log.append(line);
  if (following) log.scrollTop = log.scrollHeight;
}

// ---- parts that the server draws again ----
let asked = null;
const due = new Set();
function refresh(wait, ...wanted) {
  for (const id of wanted) due.add(id);
  clearTimeout(asked);
  asked = setTimeout(async () => {
    const ids = [...due];
    due.clear();
    try {
      const page = new DOMParser().parseFromString(await (await fetch(location.pathname)).text(), "text/html");
      for (const id of ids) {
        const fresh = page.getElementById(id);
        if (fresh) document.getElementById(id).replaceChildren(...fresh.childNodes);
      }
      for (const id of ["checks-card", "llm-card"]) document.getElementById(id).hidden = page.getElementById(id)?.hidden ?? true;
      const now = page.getElementById("run")?.dataset.runState;
      if (now && now !== run.state) { run.state = now; settle(); }
      if (ids.includes("run-outcome") && live() && finished) refresh(1000, ...ids); // the row follows its last event
    } catch { refresh(3000, ...ids); }
  }, wait);
}

const SERVER_CHARTS = ["chart-tradeoff", "predictions"];
let finished = false;
function settle() {
  $("#run-chip").replaceChildren(chip(run.state));
  root.dataset.runState = run.state;
  showPhases();
  showNumbers();
  if (!live()) {
    for (const element of $$("[data-live-only]")) element.hidden = true;
    feed.end();
  }
}

// ---- events ----
const on = {
  phase(p, event) {
    phase = p.phase;
    if (run.state === "queued") { run.state = "running"; refresh(200, "run-outcome"); }
    $("#phase-message").textContent = p.message || "";
    drawLog(event.seq, event.at, "info", p.message || p.phase);
    settle();
  },
  progress(p) { progress = p; progressAt = Date.now(); showNumbers(); },
  proposal(p) { proposals.set(p.id, p); },
  candidate(p) {
    const from = proposals.get(p.proposal_id) || {};
    upsert(p.artifact_hash, { name: p.name || from.name, focus: p.focus || from.focus, agent: from.agent, mechanism: p.mechanism || from.mechanism, hypothesis: from.hypothesis });
  },
  estimate(p) { upsert(p.artifact_hash, { predicted: p.ratio, provenance: p.provenance, seen: p.detail?.seen }); },
  experiment(p) {
    const known = candidates.get(p.artifact_hash);
    const shown = !known?.tier || p.tier >= known.tier ? { tier: p.tier, state: p.state, ratio: p.ratio, ci_low: p.ci_low, ci_high: p.ci_high, failure: p.failure } : {};
    upsert(p.artifact_hash, { ...shown, name: p.name, focus: p.focus, mechanism: p.mechanism });
    drawExperiment({ ...candidates.get(p.artifact_hash), ...p });
    refresh(1500, ...SERVER_CHARTS);
  },
  incumbent(p) {
    stat("best", fmt.times(p.ratio));
    stat("best_note", `95% ${fmt.interval(p.ci_low, p.ci_high)}`);
    announce(`Best so far ${fmt.times(p.ratio)}: ${p.name}`);
  },
  post(p) { drawPost(p, candidateUrl); },
  check() { refresh(1200, "checks"); },
  llm_usage() { refresh(1500, "llm"); },
  foci() { refresh(1500, "foci"); },
  elites() { refresh(1500, "elites"); },
  log(p, event) { drawLog(event.seq, event.at, p.level || "info", p.text); },
  end_to_end(p) { $("#phase-message").textContent = `End to end: pair ${p.pair} of ${p.of}${p.scenario ? ` (${p.scenario})` : ""}, ${fmt.times(p.ratio)}.`; },
  finished(p) { finished = true; announce(p.reason || p.outcome); refresh(300, "run-outcome", "checks", "llm", "foci", "elites", ...SERVER_CHARTS); },
  run(p) { run = { ...run, ...p }; settle(); refresh(300, "run-outcome"); },
};

const pill = $("#pill");
const feed = new RunFeed({
  socketPath: root.dataset.ws, eventsUrl: root.dataset.events, last: state.last_seq,
  apply: (event) => on[event.kind]?.(event.payload, event),
  show: (now, since) => {
    pill.dataset.state = now;
    if (since) $("[data-since]", pill).textContent = fmt.clock(since / 1000);
  },
});

showPhases();
showNumbers();
setFollow(following);
if (live()) { feed.open(); setInterval(showClock, 1000); } else pill.dataset.state = "ended";
