// Shows what stands below the charts: workers, decisions with their reasons, requests, models; and what opens from them.

import {h, long, NONE, number, percent, quantity, seconds, show, table, target, text, when} from "./dom.js";
import {facts} from "./words.js";

/** Write a worker's state with a sign, so that it does not hang on its colour. */
const SIGNS = {good: "●", warn: "▲", bad: "✕"};
const level = worker => !worker.why_not ? "good" : ["ready", "draining", "starting"].includes(worker.state) ? "warn" : "bad";

export function workerState(worker) {
  const kind = level(worker);
  return h("span", {class: `state ${kind}`}, `${SIGNS[kind]} ${worker.why_not ?? worker.state}`);
}

/** Workers that are all shown; of a larger fleet those worth a look, so many of them, and the pools, which a click unfolds. */
const TILES_MAX = 60, WORST_MAX = 24;
const unfolded = new Set();
let redraw = () => {};
const poolOf = worker => worker.id.replace(/-\d+$/, "");
const LEVELS = ["bad", "warn", "good"];

/** Return the workers of a large fleet that are worth a look, the worst first, and those of unfolded pools. */
function worth(list) {
  const marked = list.filter(worker => level(worker) !== "good" || worker.restarts);
  const worst = marked.sort((a, b) => LEVELS.indexOf(level(a)) - LEVELS.indexOf(level(b)) || (b.restarts ?? 0) - (a.restarts ?? 0)).slice(0, WORST_MAX);
  return [...worst, ...list.filter(worker => unfolded.has(poolOf(worker)) && !worst.includes(worker))];
}

/** Return a tile for each pool of a large fleet; a click shows its workers, or no longer. */
function poolTiles(list, known) {
  const pools = Map.groupBy(list, poolOf);
  return [...pools].map(([name, members]) => {
    const id = `pool ${name}`, ready = members.filter(worker => !worker.why_not).length, asked = members.some(worker => worker.requests != null);
    const tile = known.get(id) ?? h("button", {type: "button", "data-id": id, onclick: () => {
      if (!unfolded.delete(name)) unfolded.add(name);
      redraw();
    }});
    tile.className = `tile ${ready === members.length ? "good" : ready ? "warn" : "bad"}`;
    tile.setAttribute("aria-expanded", String(unfolded.has(name)));
    const running = members.reduce((sum, worker) => sum + (worker.requests ?? 0), 0);
    show(tile, h("b", {}, name), h("span", {}, `${number(ready)} of ${number(members.length)} ready`), asked ? h("span", {}, `${number(running, 0)} requests`) : null,
      h("span", {class: "soft"}, unfolded.has(name) ? "show fewer" : "show its workers"));
    return tile;
  });
}

/** Show workers as tiles; a tile opens its worker. Tiles that are there already are kept, and with them the focus. */
export function workers(element, list, empty, open) {
  if (!list.length) return show(element, h("p", {class: "empty panel"}, empty));
  const known = new Map([...element.querySelectorAll(".tile")].map(tile => [tile.dataset.id, tile]));
  redraw = () => workers(element, list, empty, open);
  const many = list.length > TILES_MAX, pools = many ? poolTiles(list, known) : [];
  const tiles = (many ? worth(list) : list).map(worker => {
    const tile = known.get(worker.id) ?? h("button", {type: "button", "data-id": worker.id, onclick: () => open(worker.id)});
    tile.className = `tile ${level(worker)}`;
    const share = worker.blocks == null || !worker.kv_blocks ? null : Math.min(1, worker.blocks / worker.kv_blocks);
    show(tile, h("b", {}, worker.id), workerState(worker),
      (worker.role ?? "aggregated") === "aggregated" ? null : h("span", {class: "soft"}, worker.role),
      worker.requests == null ? null : h("span", {}, `${number(worker.requests, 0)} ${worker.requests === 1 ? "request" : "requests"}`),
      worker.blocks == null ? null : h("span", {class: "soft"}, `KV ${share == null ? `${number(worker.blocks, 0)} blocks` : percent(share)}`),
      worker.restarts ? h("span", {class: "warn", title: worker.restart_reason}, `restarted ${worker.restarts === 1 ? "once" : `${number(worker.restarts, 0)} times`}`) : null,
      h("meter", {value: share ?? 0, "aria-hidden": "true"}));
    return tile;
  });
  const all = [...pools, ...tiles];
  if (all.length !== element.children.length || all.some((tile, i) => tile !== element.children[i])) show(element, all);
}

const cost = decision => decision.candidates?.find(candidate => target(candidate.target) === target(decision.chosen));
const priced = (cost, digits = 1) => number(cost, digits, true);
const next = decision => decision.candidates?.filter(candidate => target(candidate.target) !== target(decision.chosen))
  .reduce((best, candidate) => best == null || candidate.total < best ? candidate.total : best, null);

/** @param {import("./types").Decision[]} list */
export function decisions(list, zero, explain, empty) {
  const head = [...["Time", "Request", "Worker"].map(text), ...["Cost", "Next best", "Prefill", "Decode", "Queue", "Transfer", "Prompt", "Cached"].map(quantity), long("Because")];
  return table({caption: "Last decisions", head, empty, rows: list.map(decision => {
      const mine = cost(decision), best = next(decision);
      return {cells: [
        when(decision.at / 1e9, zero), opener(decision.request, explain), h("b", {}, target(decision.chosen)),
        mine ? `${priced(mine.total)} ${mine.unit}` : NONE, priced(best), ...["prefill", "decode", "queue", "transfer"].map(name => priced(mine?.[name])),
        `${number(decision.isl)} tokens`, number(decision.expected_cached_tokens),
        `${staged(decision)}${decision.mode}: ${decision.reason}${decision.attempt > 1 ? ` (attempt ${decision.attempt})` : ""}`]};
    })});
}

/** Say the stage of a request that is split, before what else is said of it. */
const staged = decision => (decision.stage ?? "aggregated") === "aggregated" ? "" : `${decision.stage}, `;

const opener = (request, explain) => h("button", {type: "button", class: "mono", title: "Show why", onclick: () => explain(request)}, request);
const nanos = (from, to) => from == null || to == null ? null : (to - from) / 1e9;

/** @param {import("./types").RequestEnd[]} list */
export function requests(list, zero, explain) {
  const head = [...["Ended", "Request", "Outcome", "Worker"].map(text), ...["Prompt", "Cached", "Output", "First token", "Total"].map(quantity), long("Reason")];
  return table({caption: "Last requests", head, empty: "No request has ended by then.", rows: list.map(closed => ({cells: [
      closed.closed == null ? NONE : when(closed.closed / 1e9, zero), opener(closed.id, explain),
      h("span", {class: closed.outcome === "ok" ? "good" : closed.outcome === "cancelled" ? "warn" : "bad"}, closed.outcome),
      target(closed.legs?.at(-1)?.target), number(closed.isl), number(closed.cached), number(closed.osl),
      seconds(nanos(closed.arrived, closed.first)), seconds(nanos(closed.arrived, closed.closed)),
      closed.outcome === "ok" ? "" : closed.reason]}))});
}

/**
 * Return the workers of a status, and each replica that is not there as a worker that takes no requests.
 * @param {import("./types").ClusterStatus} status
 * @returns {any[]}
 */
export function everyone(status) {
  const there = new Set(status.workers.map(worker => worker.id));
  const away = status.pools.flatMap(({model, replicas}) => (replicas ?? []).filter(one => !there.has(one.id) && !one.asleep && !["ready", "stopping"].includes(one.state))
    .map(({id, state, reason}) => ({id, model, state, why_not: reason ? `${state}: ${reason}` : state})));
  return [...status.workers, ...away];
}

/** Return how many of a model's replicas are ready, of all that it has. */
const workersOf = (status, {name}) => {
  const mine = everyone(status).filter(worker => worker.model === name);
  return `${number(mine.filter(worker => !worker.why_not).length)} of ${number(mine.length)} ready`;
};

/** @param {import("./types").ClusterStatus} status */
export function models(status) {
  const head = [text("Model"), text("Ready"), quantity("Workers"), text("Index"), quantity("Block"), text("Tokenizer"), ...["In flight", "Waiting", "Hit rate", "Answered"].map(quantity)];
  return table({caption: "Models", head, empty: "No model is configured.", rows: status.models.map(model => ({cells: [model.name, h("span", {class: model.ready ? "good" : "bad"}, model.ready ? "● yes" : "✕ no"),
      workersOf(status, model), model.index, model.block_size == null ? NONE : `${number(model.block_size)} tokens`,
      model.tokenizer ?? h("span", {class: "warn"}, "text blocks"), number(model.inflight), number(status.queue[model.name]?.length ?? 0),
      percent(model.hit_rate), number(model.ok)]}))});
}

/**
 * Return the newest programs, each with all its sub-agents.
 * @param {import("./types").ClusterStatus} status
 */
export function programs(status) {
  const head = [long("Program"), ...["Sub-agents", "Requests", "Failed", "Prompt tokens", "Output tokens", "Hit rate"].map(quantity), text("Workers")];
  return table({caption: "Programs", head, empty: "No request named a program.", rows: (status.programs ?? []).map(program => ({cells: [program.name,
      `${number(program.sessions.length)}${program.more_sessions ? " or more" : ""}`, number(program.requests), number(program.failed),
      number(program.prompt_tokens), number(program.output_tokens), percent(program.counted_tokens ? program.cached_tokens / program.counted_tokens : null),
      Object.entries(program.workers).sort((a, b) => b[1] - a[1]).slice(0, 3).map(([worker, count]) => `${worker} (${number(count)})`).join(", ")]}))});
}

const excluded = one => `${target(one.target)}${one.others ? ` and ${number(one.others)} more` : ""} ${one.reason}`;

const candidateHead = [text("Candidate"), ...["Cost", "Prefill", "Decode", "Queue", "Transfer", "Discount", "Overlap blocks", "Cached tokens", "Requests",
  "Prefill tokens", "In use"].map(quantity), text("Index")];

/**
 * Return a decision with all its candidates: the same record that `penstock explain` prints.
 * @param {import("./types").Explanation_Decision_} found
 */
export function explained(found, zero) {
  if (!found.decisions.length) return [h("p", {class: "empty"}, found.request ? "It was never placed on a worker." : "It waits for a worker.")];
  return found.decisions.flatMap(decision => [
    h("p", {}, `Attempt ${decision.attempt} went to `, h("b", {}, target(decision.chosen)), ` by ${decision.mode} at ${when(decision.at / 1e9, zero)}: ${decision.reason}`),
    decision.flow ? h("p", {class: "soft"}, `${staged(decision)}${decision.flow}`) : null,
    h("div", {class: "panel"}, table({caption: "Candidates", head: candidateHead, empty: "No candidate.", rows: decision.candidates.slice().sort((a, b) => a.total - b.total).map(one => {
        const chosen = target(one.target) === target(decision.chosen);
        return {chosen, cells: [h("b", {}, target(one.target) + (chosen ? " (chosen)" : "")), `${priced(one.total)} ${one.unit}`,
          ...["prefill", "decode", "queue", "transfer"].map(name => priced(one[name])), priced(one.discount, 2), number(one.overlap_blocks), number(one.overlap_tokens),
          number(one.active_requests), number(one.active_prefill_tokens), number(one.active_blocks), one.index]};
      })})),
    decision.left_out ? h("p", {class: "soft"}, `And ${number(decision.left_out)} other candidates, which were not written down: router.decisions is the share of requests of which all are.`) : null,
    decision.excluded?.length ? h("p", {class: "soft"}, `Not considered: ${decision.excluded.map(excluded).join("; ")}`) : null,
  ]);
}

/** Return all that is known of a worker, as names and values. */
export const card = worker => h("dl", {}, facts(worker).map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value))));
