// Shows what the planner does: demand against its forecast, replicas and GPUs over the same time, and why.

import {ChartFigure} from "./chart.js";
import {windows} from "./charts.js";
import {h, long, NONE, number, percent, quantity, replace, show, table, text, when} from "./dom.js";

/** Records kept of a live planner, and how many decisions are listed. */
const KEPT = 4000, LISTED = 12;
const CHANGES = ["apply", "advise"];

const changes = record => Object.entries(record.pools ?? {}).filter(([, pool]) => pool.target !== pool.desired);
/** Return why the pools changed: each one's own reason. */
const reason = record => [...new Set(changes(record).map(([, pool]) => pool.why).filter(Boolean))].join("; ") || (record.chosen?.[0] ?? record.bound?.[0])?.text || record.outcome;

/**
 * Return {at, q50, low, high} of what a record forecasts for a model, or null.
 * @param {import("./types").TickRecord} record
 */
export function forecast(record, model) {
  const told = record.models?.[model]?.predicted ?? {}, horizons = told.horizons ?? [];
  const ranks = Object.keys(told.quantiles ?? {}).map(Number).sort((a, b) => a - b);
  if (ranks.length && horizons.length) {
    const lead = Object.values(record.evidence ?? {}).find(found => found?.lead != null)?.lead;
    // The horizon that was decided by: how far ahead a new worker would serve.
    const place = lead == null ? horizons.length >> 1 : horizons.reduce((best, ahead, i) => Math.abs(ahead - lead) < Math.abs(horizons[best] - lead) ? i : best, 0);
    const rows = new Map(Object.entries(told.quantiles).map(([rank, row]) => [Number(rank), row]));
    const middle = rows.has(0.5) ? 0.5 : ranks[ranks.length >> 1];
    return {at: record.at + horizons[place], q50: rows.get(middle)[place], low: rows.get(ranks[0])[place], high: rows.get(ranks.at(-1))[place]};
  }
  if (!told.seconds || told.requests == null) return null;
  return {at: record.at + told.seconds / 2, q50: told.requests / told.seconds, low: null, high: null};
}

export class Planner {
  constructor(shared) {
    this.shared = shared;
    /** @type {import("./types").TickRecord[]} */
    this.records = [];
    this.charts = [];
    this.names = "";
    this.said = null;
  }

  /** How many of the newest records to ask for: all at first, later what may be new. */
  get wanted() { return this.records.length ? 20 : 1000; }

  /**
   * Take an answer of admin/planner/decisions in, the newest first.
   * @param {import("./types").PlannerDecisions_TickRecord_} answer
   */
  take(answer, fresh) {
    if (fresh) this.records = [];
    this.said = answer.planner;
    const last = this.records.at(-1)?.at ?? -Infinity;
    this.records.push(...answer.decisions.filter(record => record.at > last).reverse());
    this.records.splice(0, this.records.length - KEPT);
    const pools = [...new Set(this.records.flatMap(record => Object.keys(record.pools ?? {})))];
    const models = [...new Set(this.records.flatMap(record => Object.keys(record.models ?? {})))];
    const names = JSON.stringify([pools, models]);
    if (names === this.names) return false;
    this.names = names;
    for (const chart of this.charts) chart.end();
    const column = (name, key) => () => this.columns[name]?.[key] ?? [];
    const ahead = {joined: true}, edge = {joined: true, drawn: "hidden", colour: "s1"};  // forecast once per tick
    this.charts = [
      ...models.map(model => this.#chart(`demand-${model}`, `Demand of ${model}`, "requests per second, and what was forecast for then", "rate",
        [["arrived", column("rate", model)], ["forecast", column("q50", model), ahead], ["low", column("low", model), edge], ["high", column("high", model), edge]], [2, 3])),
      ...pools.map(pool => this.#chart(`pool-${pool}`, `Replicas of ${pool}`, "wanted by the planner, ready, starting", "count",
        [["wanted", column("target", pool)], ["ready", column("ready", pool)], ["starting", column("starting", pool)]])),
      this.#chart("gpus", "GPUs", "paid for, those of starting and draining replicas included", "count", [["paid for", column("gpus", "")]]),
    ];
    return true;
  }

  #chart(id, title, about, unit, lines, band = null) {
    const {history} = this.shared;
    const chart = new ChartFigure(() => windows(history, {title, about, empty: "no tick in this time", band},
      unit, lines.map(([name, values, more]) => ({name, values: values(), ...more}))), this.shared);
    chart.element.id = `chart-planner-${id}`;
    return chart;
  }

  /** Lay the records over the windows of the page; a tick holds until the next, but not for ever. */
  lay() {
    const {history} = this.shared, {first, count, width} = history, found = {};
    const into = (name, key) => ((found[name] ??= {})[key] ??= new Array(count).fill(null));
    const place = at => Math.floor(at / width) - first;
    const gaps = this.records.map((record, i, list) => i ? record.at - list[i - 1].at : 0).filter(gap => gap > 0).sort((a, b) => a - b);
    const holds = 3 * (gaps[Math.floor(0.9 * gaps.length)] ?? width);
    this.records.forEach((record, i) => {
      const next = Math.min(this.records[i + 1]?.at ?? record.at + holds, record.at + holds);
      for (let at = Math.max(0, place(record.at)); at < Math.min(count, Math.max(place(next), place(record.at) + 1)); at++) {
        into("gpus", "")[at] = record.gpus;
        for (const [pool, seen] of Object.entries(record.pools ?? {})) for (const name of ["target", "ready", "starting"]) into(name, pool)[at] = seen[name];
        for (const [model, seen] of Object.entries(record.models ?? {})) into("rate", model)[at] = seen.rate ?? null;
      }
      for (const model of Object.keys(record.models ?? {})) {
        const told = forecast(record, model), at = told == null ? -1 : place(told.at);
        if (at < 0 || at >= count) continue;
        for (const name of ["q50", "low", "high"]) into(name, model)[at] = told[name];
      }
    });
    this.columns = found;
  }

  /** Say how it is, and list the decisions until the moment. */
  list(about, decisions, moment) {
    const {zero} = this.shared.history.about, until = moment ?? Infinity;
    const now = this.records.findLast(record => record.at <= until);
    const judged = Object.values(now?.models ?? {}).reduce((sum, seen) => [sum[0] + seen.in_slo, sum[1] + seen.judged], [0, 0]);
    const broken = Object.entries(now?.models ?? {}).filter(([, seen]) => seen.health !== "fresh").map(([model, seen]) => `${model} is ${seen.health}`);
    about.textContent = now == null ? "no tick until then" : [`policy ${now.policy}`, `tick ${now.tick} at ${when(now.at, zero)}: ${now.outcome}`, `${number(now.gpus, 0)} GPUs`,
      judged[1] ? `${percent(judged[0] / judged[1])} of ${number(judged[1], 0)} in SLO` : null, ...broken].filter(Boolean).join(" · ");
    const rows = this.records.filter(record => record.at <= until && CHANGES.includes(record.outcome) && changes(record).length).slice(-LISTED).reverse();
    replace(decisions, table({caption: "The planner's decisions", head: [text("Time"), quantity("Tick"), text("What"), long("Because")],
      empty: "Nothing was changed until then.", rows: rows.map(record => ({cells: [
      when(record.at, zero), number(record.tick, 0),
      h("b", {}, changes(record).map(([pool, seen]) => `${pool} ${seen.desired} → ${seen.target}`).join(", ") || NONE),
      `${record.outcome === "advise" ? "advice: " : ""}${reason(record)}`]}))}));
  }

  draw(element) {
    this.lay();
    if (element.children.length !== this.charts.length || this.charts.some((chart, i) => chart.element !== element.children[i])) {
      show(element, this.charts.map(chart => chart.element));
    }
    for (const chart of this.charts) chart.draw();
  }
}
