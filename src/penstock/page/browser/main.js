// The page of a cluster or a recorded run: asks the server, keeps what it answered, and draws the moment that is looked at.

import {ChartFigure, recolour} from "./chart.js";
import {CHARTS, figures, WORKER_CHARTS} from "./charts.js";
import {$, figure, get, h, NONE, note, number, quantity, replace, seconds, show, table, text, themed, when} from "./dom.js";
import {Events} from "./events.js";
import {History} from "./history.js";
import * as lists from "./lists.js";
import {Planner} from "./planner.js";
import {Time} from "./time.js";
import {COLUMNS, written} from "./words.js";

const PERIOD = 2000, HIDDEN_PERIOD = 10000, LISTED = 12, LISTED_OF_WORKER = 20, ROWS = 30;
/** Milliseconds between looks at the lists while the moment moves. */
const LIST_PERIOD = 300;

const history = new History();
const time = new Time(history, changed);
/** What all charts share.
 * @type {import("./chart.js").View & {history: History}} */
const shared = {
  history,
  get range() { return /** @type {[number, number]} */ ([time.from, time.to]); }, get zero() { return history.about.zero; },
  get moment() { return time.moment; }, get hoverAt() { return time.hoverAt; }, get fades() { return time.fades; },
  get at() { return (history.first + history.place(time.hoverAt ?? time.moment) + 0.5) * history.width; },
  begins: () => time.begins(), events: () => events.list, hovered: at => time.hover(at), pinned: at => time.pin(at),
};
const events = new Events(shared);
const charts = Object.entries(CHARTS).map(([id, make]) => {
  const chart = new ChartFigure(() => make(history, time.log), shared);
  chart.element.id = `chart-${id}`;
  return chart;
});
const planner = new Planner(shared);
/** @type {import("./types").ClusterStatus | null} */
let status = null;
let opened = null, workerCharts = [], workerColumns = {requests: [], prefill: [], kv: []}, lostAt = null, failed = false, notes = [], notesSaid = "";

// --- drawing ---------------------------------------------------------------------------------------------------------

let wanted = null;
function changed(what) {
  const rank = {hover: 0, moment: 1, range: 2};
  if (wanted == null) requestAnimationFrame(() => { const now = wanted; wanted = null; draw(now); });
  if (wanted == null || rank[what] > rank[wanted]) wanted = what;
}

function draw(what) {
  const all = [...charts, ...workerCharts];
  if (what === "range") for (const chart of all) chart.draw();
  else for (const chart of [...all, ...planner.charts]) chart.mark();
  if (!$("planner").hidden) {
    if (what === "range") planner.draw($("planner-charts"));
    if (what !== "hover") planner.list($("planner-about"), $("planner-decisions"), time.moment);
  }
  showFigures();
  time.tell();
  if (what === "range") events.draw();
  else events.tell();
  if (what === "hover") return;
  showNumbers();
  refresh();
}

function showFigures() {
  const found = figures(history, history.place(time.hoverAt ?? time.moment));
  show($("figures"), found.map(figure));
}

function showNumbers() {
  if (!$("numbers").open) return;
  const last = history.place(time.moment), first = Math.max(0, last - ROWS + 1), places = [];
  for (let place = last; place >= first; place--) places.push(place);
  const names = Object.keys(history.columns);
  show($("numbers-table"), table({caption: `Windows of ${history.width} s`, head: [text("Window from"), ...names.map(name => quantity(COLUMNS[name]?.[0] ?? name))], empty: "No window.",
    rows: places.map(place => ({cells: [when((history.first + place) * history.width, history.about.zero), ...names.map(name => written(COLUMNS[name], history.value(name, place)))]}))}));
}

function download() {
  const names = Object.keys(history.columns), pools = Object.entries(history.pools);
  const head = ["seconds", ...names, ...pools.flatMap(([pool]) => [`${pool}_there`, `${pool}_ready`])];
  const rows = Array.from({length: history.count}, (_, place) => [(history.first + place) * history.width,
    ...names.map(name => history.value(name, place) ?? ""), ...pools.flatMap(([, parts]) => [parts.there[place] ?? "", parts.ready[place] ?? ""])]);
  const url = URL.createObjectURL(new Blob([[head, ...rows].map(row => row.join(",")).join("\n") + "\n"], {type: "text/csv"}));
  h("a", {href: url, download: "penstock-windows.csv"}).click();
  URL.revokeObjectURL(url);
}

// --- what is under the charts ----------------------------------------------------------------------------------------

let asking = false, askAgain = false, askedAt = 0;
/** Ask for the lists of the moment: one question at a time, and not too often while the moment moves. */
async function refresh() {
  if (asking) { askAgain = true; return; }
  asking = true;
  const wait = askedAt + LIST_PERIOD - performance.now();
  if (wait > 0) await new Promise(done => setTimeout(done, wait));
  askedAt = performance.now();
  askAgain = false;
  try {
    await showLists();
    answered();
  } catch (error) {
    lost(error);
  }
  asking = false;
  if (askAgain && !failed) refresh();
}

async function showLists() {
  const {moment} = time, {zero} = history.about, at = moment == null ? "" : `&before=${moment.toFixed(3)}`;
  /** @type {[import("./types").DecisionList_Decision_, import("./types").RequestList, import("./types").LoadsView | null]} */
  const [decisions, requests, loads] = await Promise.all([
    get(`admin/decisions?limit=${LISTED}${at}`), get(`admin/requests?limit=${LISTED}${at}`),
    moment == null ? null : get(`admin/timeline/workers?at=${moment.toFixed(3)}`)]);
  const then = moment == null ? "" : `until ${when(moment, zero)}`;
  for (const id of ["decisions-when", "requests-when"]) $(id).textContent = then;
  replace($("decisions"), lists.decisions(decisions.decisions, zero, explain, history.about.decisions === false
    ? "This run has no decisions.jsonl." : moment == null ? "No request has been routed yet." : "No decision until then is kept."));
  replace($("requests"), lists.requests(requests.requests, zero, explain));
  showWorkers(moment, loads);
  if (opened != null) await showWorker();
}

function showWorkers(moment, loads) {
  let list, empty = "No worker has joined, so no request can be answered yet.";
  if (moment == null) {
    list = (status ? lists.everyone(status) : []).map(worker => ({...worker, requests: worker.active_requests, blocks: worker.active_blocks}));
  } else {
    list = Object.entries(loads.workers ?? {}).map(([id, load]) => ({id, ...load, state: load.ready ? "ready" : "not ready", why_not: load.ready ? null : "not ready"}));
    empty = loads.workers == null ? "Nobody looked at the workers at this moment." : "There was no worker.";
  }
  const ready = `${number(list.filter(worker => !worker.why_not).length)} of ${number(list.length)} ready`;
  $("workers-when").textContent = `${ready}${moment == null ? "" : ` at ${when(loads.at, history.about.zero)}`}; one click opens a worker`;
  list.sort((a, b) => a.id.localeCompare(b.id, "en", {numeric: true}));
  lists.workers($("workers"), list, empty, openWorker);
}

// --- a worker, a request ----------------------------------------------------------------------------------------------

function openWorker(id) {
  opened = id;
  $("worker-name").textContent = id;
  show($("worker-body"), h("p", {class: "empty"}, "asking"));
  $("worker").showModal();
  changed("moment");
}

async function showWorker() {
  const id = opened, {moment} = time, {zero} = history.about;
  const before = moment == null ? "" : `&before=${moment.toFixed(3)}`;
  /** @type {[import("./types").WorkerColumns & {card?: import("./types").RecordedWorker}, import("./types").DecisionList_Decision_]} */
  const [told, found] = await Promise.all([get(`admin/timeline/workers/${encodeURIComponent(id)}`),
    get(`admin/decisions?limit=${LISTED_OF_WORKER}&worker=${encodeURIComponent(id)}${before}`)]);
  if (opened !== id) return;
  const mine = (status ? lists.everyone(status) : []).find(worker => worker.id === id) ?? told.card ?? {id};
  const column = name => Array.from({length: history.count}, (_, place) => told.columns[name][history.first + place - told.first] ?? null);
  const share = (held, room) => held.map((value, place) => value == null || !room[place] ? null : value / room[place]);
  workerColumns = {requests: column("requests"), prefill: column("prefill_tokens"), kv: share(column("blocks"), column("kv_blocks"))};
  if (!workerCharts.length) {
    workerCharts = WORKER_CHARTS.map(make => new ChartFigure(() => make(history, workerColumns), shared));
    show($("worker-body"), h("div", {id: "worker-card"}), h("div", {class: "charts"}, workerCharts.map(chart => chart.element)),
      h("h3", {}, "Its last decisions"), h("div", {class: "panel", id: "worker-decisions"}));
  }
  show($("worker-state"), "state" in mine ? lists.workerState(mine) : "");
  show($("worker-card"), lists.card(mine));
  replace($("worker-decisions"), lists.decisions(found.decisions, zero, explain, "No decision for it is kept."));
  for (const chart of workerCharts) chart.draw();
}

async function explain(id) {
  try {
    /** @type {import("./types").Explanation_Decision_} */
    const found = await get(`admin/explain/${encodeURIComponent(id)}`), {request} = found;
    $("explain-name").textContent = `Request ${id}`;
    $("explain-end").textContent = !request ? "has not ended yet" : `${request.outcome}${request.outcome === "ok" ? "" : `: ${request.reason}`}; ` +
      `${number(request.isl)} prompt tokens, ${number(request.cached)} cached (${number(request.expected_cached)} expected), ${number(request.osl)} output tokens, ` +
      `first token after ${request.first == null ? NONE : seconds((request.first - request.arrived) / 1e9)}` + (request.way ? `; ${request.way}` : "");
    show($("explain-body"), lists.explained(found, history.about.zero));
  } catch (error) {
    $("explain-name").textContent = `Request ${id}`;
    $("explain-end").textContent = "";
    show($("explain-body"), h("p", {class: "empty"}, error.message));
  }
  if (!$("explain").open) $("explain").showModal();
}

// --- the server -------------------------------------------------------------------------------------------------------

function answered() {
  failed = false;
  lostAt = null;
  $("away").hidden = true;
}

function lost(error) {
  failed = true;
  lostAt ??= new Date();
  const since = lostAt.toTimeString().slice(0, 8);
  const said = `No answer since ${since}: ${error.message}. The page shows what it had until then, and asks again every few seconds.`;
  $("away").hidden = false;
  if ($("away").textContent !== said) $("away").textContent = said;
}

function tellNotes() {
  const {about} = history, found = [...notes];
  if (about.kind === "live") {
    found.push(...(status?.findings ?? []));
    for (const [name, since] of time.begins()) {
      found.push({level: "info", text: `${name} began at ${when(since, about.zero)} and has seen nothing before`,
        hint: "What a frontend that it replaced had seen is shown as far as this page was told; the run folder has every request: penstock ui RUN_FOLDER"});
    }
    if (!history.columns.arrived.some(Boolean)) found.push({level: "info", text: "No request has arrived yet", hint: "penstock chat Hello sends one"});
  } else {
    found.push(...about.notes.map(text => ({level: "info", text})));
    if (!history.columns.arrived.some(Boolean)) found.push({level: "warning", text: "This run has no request", hint: "Its requests.jsonl is empty"});
  }
  const said = JSON.stringify(found);
  if (said === notesSaid) return;  // a screen reader would say it all again
  notesSaid = said;
  show($("notes"), found.map(note));
}

/** Ask what the planner did since, where one runs or ran. */
async function askPlanner(there, fresh) {
  if (there) planner.take(await get(`admin/planner/decisions?ticks=all&limit=${planner.wanted}`), fresh);
  $("planner").hidden = !planner.records.length;
}

function tellAbout() {
  const {about} = history;
  $("name").textContent = about.name === "penstock" ? "" : about.name;
  document.title = `${about.name} - Penstock`;
  if (about.kind !== "live") {
    $("about").textContent = `recorded run, ${seconds(about.now)} in windows of ${about.width} s · ${about.run}`;
  } else if (status) {
    $("about").textContent = `live · ${status.endpoint}/v1 · ${status.mode} routing · up ${seconds(status.uptime)} · version ${status.version}${status.draining ? " · draining" : ""} · ${status.run}`;
  }
}

async function turn() {
  try {
    const ask = history.about == null ? "" : `?from=${history.open}`;
    const answer = await get(`admin/timeline${ask}`);
    const first = history.about == null, fresh = history.take(answer);
    if (fresh) notes = [{level: "warning", text: "The cluster was started anew, so the charts begin anew"}];
    if (answer.kind === "live") {
      status = await get("admin/status");
      show($("models"), lists.models(status));
      show($("programs"), lists.programs(status));
    }
    await askPlanner(answer.kind === "live" ? status.planner : answer.planner, fresh);
    $("live-only").hidden = answer.kind !== "live";
    if (first || fresh) time.open();
    tellAbout();
    tellNotes();
    answered();
    changed("range");
  } catch (error) {
    lost(error);
  }
  if (history.about == null || history.about.kind === "live") setTimeout(turn, document.hidden ? HIDDEN_PERIOD : PERIOD);
}

// --- controls -----------------------------------------------------------------------------------------------------------

themed(() => {
  recolour();
  if (history.about) changed("range");
});

for (const dialog of document.querySelectorAll("dialog")) {
  dialog.querySelector(".close").addEventListener("click", () => dialog.close());
  dialog.addEventListener("click", event => { if (event.target === dialog) dialog.close(); });
}
$("worker").addEventListener("close", () => {
  opened = null;
  for (const chart of workerCharts) chart.end();
  workerCharts = [];
});
$("numbers").addEventListener("toggle", showNumbers);
$("csv").addEventListener("click", download);
show($("charts"), charts.map(chart => chart.element));
new ResizeObserver(() => { if (history.about) changed("range"); }).observe($("charts"));
turn();
