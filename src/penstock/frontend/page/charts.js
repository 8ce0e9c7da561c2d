// Which charts and figures are there? Each is made of the columns of admin/timeline.

import {number, percent, rate, seconds} from "./dom.js";
import {ended, per} from "./history.js";

const promised = history => ["slo_ttft", "slo_itl"].some(name => history.columns[name]?.some(value => value != null));
const inSlo = read => per(read("in_slo"), read("judged"));
const hits = read => per(read("cached_tokens"), read("cache_reported_tokens"));

function latency(history, name, title, about) {
  const column = part => history.columns[`${name}_${part}`] ?? [];
  const limit = history.columns[`slo_${name}`] ?? [];
  return {
    title, about, unit: "seconds", latency: true, empty: `no ${name.toUpperCase()} was seen in this time`,
    lines: [{name: "p50", values: column("p50")}, {name: "p95", values: column("p95")}, {name: "p99", values: column("p99")}],
    band: [column("p50"), column("p99")],
    limit: limit.some(value => value != null) ? {name: "SLO", values: limit} : null,
  };
}

export const CHARTS = {
  slo: history => ({
    title: promised(history) ? "Requests in SLO" : "Requests answered in full",
    about: promised(history) ? "% of those that ended" : "% of those that ended; no SLO is set (slo.ttft, slo.itl)",
    unit: "share", empty: "no request ended in this time",
    lines: [{name: promised(history) ? "in SLO" : "answered", values: history.made(inSlo)}],
  }),
  ttft: history => latency(history, "ttft", "Time to first token", "by the time of the token"),
  itl: history => latency(history, "itl", "Inter-token latency", "each answer's mean, by its end"),
  demand: history => ({
    title: "Demand", about: "requests per second", unit: "rate",
    lines: [
      {name: "arrive", values: history.made(read => per(read("arrived"), history.width))},
      {name: "answered", values: history.made(read => per(read("ok"), history.width))},
      {name: "failed or rejected", values: history.made(read => read("ok") == null ? null : (ended(read) - read("ok")) / history.width)},
    ],
  }),
  tokens: history => ({
    title: "Tokens", about: "per second", unit: "rate",
    lines: [
      {name: "prompt, arriving", values: history.made(read => per(read("prompt_tokens"), history.width))},
      {name: "output, of ended requests", values: history.made(read => per(read("output_tokens"), history.width))},
    ],
  }),
  load: history => ({
    title: "Requests", about: "at one moment of each window", unit: "count",
    lines: [{name: "on workers", values: history.columns.running ?? []}, {name: "waiting for one", values: history.columns.queued ?? []}],
  }),
  replicas: history => ({
    title: "Replicas", about: "per pool; ready: can take requests", unit: "count", empty: "no worker was seen in this time",
    lines: Object.entries(history.pools).flatMap(([pool, parts]) => [
      {name: `${pool} ready`, values: parts.ready}, {name: `${pool} there`, values: parts.there}]),
  }),
  cache: history => ({
    title: "Cache", about: "% of prompt tokens, % of KV blocks", unit: "share",
    lines: [{name: "hit rate", values: history.made(hits)}, {name: "KV blocks in use", values: history.columns.kv_use ?? []}],
  }),
};

/** Return [name, value, note] of the figures of one window. */
export function figures(history, place) {
  const read = name => history.value(name, place);
  const limit = name => read(`slo_${name}`) == null ? "no SLO" : `SLO ${seconds(read(`slo_${name}`))}`;
  const sum = part => {
    const found = Object.values(history.pools).map(parts => parts[part]?.[place]).filter(value => value != null);
    return found.length ? found.reduce((a, b) => a + b, 0) : null;
  };
  return [
    [promised(history) ? "in SLO" : "answered in full", percent(inSlo(read)), "of requests that ended"],
    ["TTFT p95", seconds(read("ttft_p95")), limit("ttft")],
    ["ITL p95", seconds(read("itl_p95")), limit("itl")],
    ["requests arrive", rate(per(read("arrived"), history.width)), `answered ${rate(per(read("ok"), history.width))}`],
    ["output tokens", rate(per(read("output_tokens"), history.width)), `prompt ${rate(per(read("prompt_tokens"), history.width))}`],
    ["requests on workers", number(read("running"), 0), `waiting ${number(read("queued"), 0)}`],
    ["replicas ready", number(sum("ready"), 0), `of ${number(sum("there"), 0)}`],
    ["hit rate", percent(hits(read)), `KV in use ${percent(read("kv_use"))}`],
  ];
}
