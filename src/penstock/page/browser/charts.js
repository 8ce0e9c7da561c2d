// Makes the charts and figures of a cluster or a recorded run, of the columns of admin/timeline.

import {number, percent, rate, seconds} from "./dom.js";
import {ended, per} from "./history.js";

const promised = history => ["slo_ttft", "slo_itl"].some(name => history.columns[name]?.some(value => value != null));
const inSlo = read => per(read("in_slo"), read("judged"));
const hits = read => per(read("cached_tokens"), read("cache_reported_tokens"));

/**
 * Return a chart of columns that have a number for each window; a series that is `joined` goes on over windows without one.
 * @param {{title: string, about: string, empty?: string, band?: [number, number] | null}} about
 * @param {import("./types").Axis["unit"]} unit
 * @returns {import("./types").Chart}
 */
export function windows(history, about, unit, series, log = false) {
  const at = history.middles;
  return {empty: "nothing to show in this time", ...about, x: {unit: "time"}, y: {unit, log},
    series: series.map(({values, joined, ...each}) => {
      const places = at.map((_, place) => place).filter(place => !joined || values[place] != null);
      return {...each, at: joined ? places.map(place => at[place]) : at, values: places.map(place => values[place] ?? null)};
    })};
}

function latency(history, log, name, title, about) {
  const column = part => history.columns[`${name}_${part}`] ?? [];
  const limit = history.columns[`slo_${name}`] ?? [];
  return windows(history, {title, about, empty: `no ${name.toUpperCase()} was seen in this time`, band: [0, 2]}, "seconds", [
    {name: "p50", values: column("p50")}, {name: "p95", values: column("p95")}, {name: "p99", values: column("p99")},
    ...(limit.some(value => value != null) ? [{name: "SLO", values: limit, limit: true}] : [])], log);
}

/** Charts by id, made of the history, and of whether latencies are on a scale of logarithms. */
export const CHARTS = {
  slo: history => windows(history, {
    title: promised(history) ? "Requests in SLO" : "Requests answered in full",
    about: promised(history) ? "% of those that ended" : "% of those that ended; no SLO is set (slo.ttft, slo.itl)", empty: "no request ended in this time",
  }, "share", [{name: promised(history) ? "in SLO" : "answered", values: history.made(inSlo)}]),
  ttft: (history, log) => latency(history, log, "ttft", "Time to first token", "by the time of the token"),
  itl: (history, log) => latency(history, log, "itl", "Inter-token latency", "each answer's mean, by its end"),
  demand: history => windows(history, {title: "Demand", about: "requests per second"}, "rate", [
    {name: "arrive", values: history.made((read, passed) => per(read("arrived"), passed))},
    {name: "answered", values: history.made((read, passed) => per(read("ok"), passed))},
    {name: "failed or rejected", values: history.made((read, passed) => read("ok") == null ? null : per(ended(read) - read("ok"), passed))}]),
  tokens: history => windows(history, {title: "Tokens", about: "per second"}, "rate", [
    {name: "prompt, arriving", values: history.made((read, passed) => per(read("prompt_tokens"), passed))},
    {name: "output, of ended requests", values: history.made((read, passed) => per(read("output_tokens"), passed))}]),
  load: history => windows(history, {title: "Requests", about: "at one moment of each window"}, "count", [
    {name: "on workers", values: history.columns.running ?? []}, {name: "waiting for one", values: history.columns.queued ?? []}]),
  replicas: history => windows(history, {title: "Replicas", about: "per pool; ready: can take requests", empty: "no worker was seen in this time"}, "count",
    Object.entries(history.pools).flatMap(([pool, parts]) => [{name: `${pool} ready`, values: parts.ready}, {name: `${pool} there`, values: parts.there}])),
  cache: history => windows(history, {title: "Cache", about: "% of prompt tokens, % of KV blocks"}, "share", [
    {name: "hit rate", values: history.made(hits)}, {name: "KV blocks in use", values: history.columns.kv_use ?? []}]),
};

/** Charts of one worker, of its columns over the same windows. */
export const WORKER_CHARTS = [
  (history, {requests}) => windows(history, {title: "Requests on it", about: "at one moment of each window"}, "count", [{name: "requests", values: requests}]),
  (history, {prefill}) => windows(history, {title: "Prompt tokens to compute", about: "at one moment of each window"}, "count", [{name: "tokens", values: prefill}]),
  (history, {kv}) => windows(history, {title: "KV blocks in use", about: "% of its blocks"}, "share", [{name: "in use", values: kv}]),
];

/**
 * Return the key figures of one window.
 * @returns {import("./types").KeyFigure[]}
 */
export function figures(history, place) {
  const read = name => history.value(name, place), speed = name => rate(per(read(name), history.passed(place)));
  const limit = name => read(`slo_${name}`) == null ? "no SLO" : `SLO ${seconds(read(`slo_${name}`))}`;
  const sum = part => {
    const found = Object.values(history.pools).map(parts => parts[part]?.[place]).filter(value => value != null);
    return found.length ? found.reduce((a, b) => a + b, 0) : null;
  };
  const made = [
    [promised(history) ? "in SLO" : "answered in full", percent(inSlo(read)), "of requests that ended"],
    ["TTFT p95", seconds(read("ttft_p95")), limit("ttft")],
    ["ITL p95", seconds(read("itl_p95")), limit("itl")],
    ["requests arrive", speed("arrived"), `answered ${speed("ok")}`],
    ["output tokens", speed("output_tokens"), `prompt ${speed("prompt_tokens")}`],
    ["requests on workers", number(read("running"), 0), `waiting ${number(read("queued"), 0)}`],
    ["replicas ready", number(sum("ready"), 0), `of ${number(sum("there"), 0)}`],
    ["hit rate", percent(hits(read)), `KV in use ${percent(read("kv_use"))}`],
  ];
  return made.map(([name, value, note]) => ({name, value, note}));
}
