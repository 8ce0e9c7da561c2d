// Words for the fields of a worker and of a time window, and how the value of each is written.

import {NONE, number, percent, seconds} from "./dom.js";

const count = value => number(value, 0), mean = value => number(value, 1), ms = value => seconds(value == null ? null : value / 1e3);
const perSecond = value => value == null ? NONE : `${mean(value)} tokens/s`;

/** What windows count, by column: in words, and how it is written. */
export const COLUMNS = {
  arrived: ["Arrived", count], prompt_tokens: ["Prompt tokens", count], output_tokens: ["Output tokens", count],
  judged: ["Ended, judged by the SLO", count], in_slo: ["In SLO", count], cached_tokens: ["Cached prompt tokens", count],
  cache_reported_tokens: ["Prompt tokens whose cache is known", count], running: ["On workers", count], queued: ["Waiting for a worker", count],
  slo_ttft: ["SLO of TTFT", seconds], slo_itl: ["SLO of ITL", seconds], kv_use: ["KV blocks in use", percent],
  ok: ["Answered", count], failed: ["Failed", count], rejected: ["Rejected", count], expired: ["Past their deadline", count],
  cancelled: ["Cancelled by clients", count], unsent: ["Not sent", count],
  ttft_p50: ["TTFT p50", seconds], ttft_p95: ["TTFT p95", seconds], ttft_p99: ["TTFT p99", seconds],
  itl_p50: ["ITL p50", seconds], itl_p95: ["ITL p95", seconds], itl_p99: ["ITL p99", seconds],
};

/** What is known of a worker, by path: in words, and how it is written where it is not a text. */
const WORKER = {
  id: ["Name"], model: ["Model"], role: ["Role"], pool: ["Pool"], url: ["URL"], engine: ["Engine"], state: ["State"],
  why_not: ["Takes no requests because"], since: ["In this state for", seconds], pid: ["Process ID"],
  epoch: ["Number of its start (epoch)"], restarts: ["Restarts", count], restart_reason: ["Last restarted because"],
  paired: ["Takes only requests in which a worker of another role has a part", yes => yes ? "yes" : "no"],
  active_requests: ["Requests now", count], active_prefill_tokens: ["Prompt tokens to compute", count], requests: ["Requests so far", count],
  failures: ["Failed requests", count], breaker: ["Circuit breaker"],
  active_blocks: ["KV blocks in use", count], resident_blocks: ["KV blocks in its memory", count], kv_blocks: ["KV blocks in all", count], block_size: ["Tokens per KV block", count],
  index: ["What is known of its cache"], "kv_events.applied": ["KV events applied", count], "kv_events.gaps": ["Gaps in its KV events", count],
  "kv_events.lost": ["Gaps that were not replayed", count], stats: ["Statistics plug-in at"],
  "steps.source": ["Statistics of passes from"], "steps.wall_window_s": ["Passes counted over", seconds], "steps.wall_age_s": ["Counted", value => `${seconds(value)} ago`],
  "steps.wall_passes": ["Passes", count], "steps.wall_pass_ms": ["Mean pass", ms], "steps.wall_prefill_tokens_per_s": ["Prefill speed", perSecond],
  "steps.wall_decode_tokens_per_s": ["Decode speed", perSecond], "steps.wall_decode_seqs": ["Sequences decoded in a pass", mean],
  "steps.wall_decode_kv_tokens": ["KV tokens read in a pass", mean], "steps.wall_queued_requests": ["Requests waiting in the engine", mean],
  "steps.wall_queued_prefill_tokens": ["Prompt tokens waiting in the engine", mean], "steps.estimated": ["Estimated, not measured"],
  "canary.sent": ["Canary probes", count], "canary.missed": ["Canary probes missed", count], "canary.verdict": ["The canary's verdict"],
  "canary.wall_s": ["Its last token took", seconds],
  decisions_for_it: ["Decisions for it", count], first_seen_s: ["First there after", seconds], last_seen_s: ["Last there after", seconds],
};
/** Fields whose null says that there is nothing to be told, and not that it is unknown. */
const NOTHING = new Set(["why_not", "restart_reason", "stats", "kv_events", "steps", "canary"]);

/** Write a value by its entry above. */
export const written = (entry, value) => entry?.[1] ? entry[1](value) : value == null ? NONE : Array.isArray(value) ? value.join(", ") || NONE : String(value);

/** Return the facts about a worker as pairs of words and text; labels go by the names that an operator gave them. */
export function facts(worker, within = "") {
  return Object.entries(worker).flatMap(([name, value]) => {
    const path = within + name;
    if (value == null && NOTHING.has(path)) return [];
    if (value !== null && typeof value === "object" && !Array.isArray(value)) return facts(value, `${path}.`);
    return [[WORKER[path]?.[0] ?? path.replace(/^labels\./, "Label "), written(WORKER[path], value)]];
  });
}
