// How is one chart drawn? Lines, a band and a limit over time; all charts share the range of time and the moments marked.

import {h, number, percent, rate, seconds, show, svg, when} from "./dom.js";

const HEIGHT = 150, LEFT = 52, RIGHT = 12, TOP = 10, BOTTOM = 20;
const STEPS = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400, 172800, 604800];
const UNITS = {share: percent, seconds, rate, count: value => number(value, 0)};
const short = value => value < 10000 ? number(value, 1) : value < 1e6 ? `${number(value / 1e3, 1)}k` : `${number(value / 1e6, 1)}M`;
/** How the axis writes a number: it has room for eight characters. */
const TICKS = {share: value => `${number(100 * value, 0)} %`, seconds: value => value ? seconds(value).replace(/\.0+ /, " ") : "0 s", rate: value => `${short(value)}/s`, count: short};
/** Smallest upper end of an axis by unit, so that noise of nothing does not fill it. */
const LEAST = {share: 1, seconds: 0.01, rate: 1, count: 4};

/** Return round numbers from low to high. */
export function ticks(low, high, most) {
  const rough = (high - low) / most || 1, ten = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].find(factor => factor * ten >= rough * 0.999) * ten;
  const found = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high * (1 + 1e-9); i++) found.push(i * step + 0);  // never -0
  return found;
}

function decades(low, high) {
  const found = [];
  for (let power = Math.floor(Math.log10(low)); 10 ** power <= high * 1.001; power++) {
    const factors = high / low > 200 ? [1] : [1, 2, 5];
    for (const factor of factors) if (factor * 10 ** power >= low * 0.999 && factor * 10 ** power <= high * 1.001) found.push(factor * 10 ** power);
  }
  return found;
}

/** Return ticks of an axis of time, at round times of the clock where it is known. */
export function timeTicks(from, to, width, zero) {
  const step = STEPS.find(length => (to - from) / length * 74 <= width) ?? STEPS.at(-1);
  const shift = zero == null ? 0 : zero - new Date(1e3 * zero).getTimezoneOffset() * 60;
  const found = [];
  for (let at = Math.ceil((from + shift) / step) * step - shift; at <= to; at += step) found.push(at);
  return {step, ticks: found};
}

export class Chart {
  /** spec: {title, about, unit, lines: [{name, values}], band: [low, high], limit: {name, values}, most, latency}, made by `spec()` at each draw. */
  constructor(make, shared) {
    this.make = make;
    this.shared = shared;
    this.title = h("h3");
    this.keys = h("span", {class: "key"});
    this.caption = h("figcaption", {}, this.title);
    this.canvas = svg("svg", {role: "img", height: HEIGHT});
    this.element = h("figure", {class: "chart"}, this.caption, this.canvas);
    this.canvas.addEventListener("pointermove", event => shared.hovered(this.#moment(event)));
    this.canvas.addEventListener("pointerleave", () => shared.hovered(null));
    this.canvas.addEventListener("click", event => shared.pinned(this.#moment(event)));
  }

  #moment(event) {
    const box = this.canvas.getBoundingClientRect();
    const share = (event.clientX - box.left - LEFT) / (box.width - LEFT - RIGHT);
    const {from, to} = this.shared;
    return from + Math.min(1, Math.max(0, share)) * (to - from);
  }

  /** Draw everything anew; `mark` alone moves the moments. */
  draw() {
    const width = this.canvas.clientWidth;
    if (!width) return;
    const spec = this.spec = this.make();
    const {from, to, history, log} = this.shared;
    const start = Math.max(0, Math.floor(from / history.width) - history.first);
    const end = Math.min(history.count, Math.ceil(to / history.width) - history.first);
    this.x = at => LEFT + (at - from) / Math.max(to - from, 1e-9) * (width - LEFT - RIGHT);
    const middle = place => this.x((history.first + place + 0.5) * history.width);
    const shown = [...spec.lines, ...(spec.band ?? []).map(values => ({values})), ...(spec.limit ? [spec.limit] : [])];
    let least = Infinity, most = -Infinity, known = 0;
    for (const {values} of shown) {
      for (let place = start; place < end; place++) {
        const value = values[place];
        if (value == null) continue;
        if (values !== spec.limit?.values) known++;
        if (value > 0 && value < least) least = value;
        if (value > most) most = value;
      }
    }
    const logged = log && spec.latency && least < Infinity;
    const high = spec.unit === "share" ? 1 : Math.max(LEAST[spec.unit], most > 0 ? most * (logged ? 1.25 : 1.06) : 0);
    const low = logged ? Math.min(least / 1.2, high / 10) : 0;
    const span = HEIGHT - TOP - BOTTOM;
    this.y = value => HEIGHT - BOTTOM - span * (logged ? Math.log(Math.max(value, low) / low) / Math.log(high / low) : value / high);

    show(this.title, spec.title, " ", h("span", {class: "soft"}, spec.about ?? ""));
    this.canvas.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    const parts = [];
    for (const tick of logged ? decades(low, high) : ticks(low, high, 4)) {
      const y = this.y(tick);
      parts.push(svg("line", {class: "gridline", x1: LEFT, x2: width - RIGHT, y1: y, y2: y, "data-value": tick}));
      parts.push(svg("text", {x: LEFT - 6, y: y + 4, "text-anchor": "end"}, TICKS[spec.unit](tick)));
    }
    const across = timeTicks(from, to, width - LEFT - RIGHT, history.about.zero);
    for (const tick of across.ticks) {
      const x = this.x(tick), text = when(tick, history.about.zero, across.step >= 60);
      parts.push(svg("line", {class: "gridline", x1: x, x2: x, y1: TOP, y2: HEIGHT - BOTTOM}));
      if (x > LEFT + 8 && x < width - 24) parts.push(svg("text", {x, y: HEIGHT - 5, "text-anchor": "middle"}, text));
    }
    if (spec.band) parts.push(svg("path", {class: "band s0", d: band(spec.band, start, end, middle, this.y, this.#half)}));
    spec.lines.forEach((line, number) => parts.push(svg("path", {
      class: `line s${number % 6}${end - start > (width - LEFT - RIGHT) / 2 ? " dense" : ""}`, "data-name": line.name, d: path(line.values, start, end, middle, this.y, this.#half)})));
    if (spec.limit) this.#limit(parts, spec.limit, start, end, middle, width);
    if (!known) parts.push(svg("text", {class: "none", x: width / 2 + LEFT / 2, y: HEIGHT / 2, "text-anchor": "middle"}, spec.empty ?? "nothing to show in this time"));
    for (const [name, since] of this.shared.begins()) {
      if (since <= from || since >= to) continue;
      const x = this.x(since), late = x > width - 150;
      parts.push(svg("line", {class: "began", x1: x, x2: x, y1: TOP, y2: HEIGHT - BOTTOM}));
      parts.push(svg("text", {class: "began-text", x: x + (late ? -4 : 4), y: HEIGHT - BOTTOM - 5, "text-anchor": late ? "end" : "start"}, name));
    }
    this.veil = svg("rect", {class: "veil", y: TOP - 4, height: HEIGHT - TOP - BOTTOM + 4, width: 0});
    this.at = svg("line", {class: "at", y1: TOP - 4, y2: HEIGHT - BOTTOM});
    this.hover = svg("line", {class: "hover", y1: TOP - 4, y2: HEIGHT - BOTTOM});
    show(this.canvas, svg("title", {}, `${spec.title} ${spec.about ?? ""}`), parts, this.veil, this.at, this.hover);
    this.edge = width - RIGHT;
    this.mark();
  }

  get #half() {
    return Math.max(1, (this.x(this.shared.history.width) - this.x(0)) / 2);
  }

  #limit(parts, limit, start, end, middle, width) {
    const d = path(limit.values, start, end, middle, this.y, this.#half);
    if (!d) return;
    const last = limit.values.slice(start, end).findLast(value => value != null), y = this.y(last);
    parts.push(svg("path", {class: "limit", "data-value": last, d}));
    parts.push(svg("text", {class: "limit-text", x: width - RIGHT - 2, y: y < 26 ? y + 13 : y - 4, "text-anchor": "end"}, `${limit.name} ${seconds(last)}`));
  }

  /** Move the moments, and tell the numbers of the one that is looked at. */
  mark() {
    if (!this.spec) return;
    const {hoverAt, moment, history, from, to, fades} = this.shared;
    const place = history.place(hoverAt ?? moment);
    this.hover.toggleAttribute("hidden", hoverAt == null);
    if (hoverAt != null) for (const end of ["x1", "x2"]) this.hover.setAttribute(end, this.x(hoverAt));
    const marked = moment != null && moment >= from && moment <= to;
    this.at.toggleAttribute("hidden", !marked);
    if (marked) for (const end of ["x1", "x2"]) this.at.setAttribute(end, this.x(moment));
    const veil = fades && marked ? Math.max(0, this.edge - this.x(moment)) : 0;
    this.veil.setAttribute("x", this.edge - veil);
    this.veil.setAttribute("width", veil);
    const told = this.spec.lines.map((line, number) => [sample(`line s${number % 6}`), line.name, UNITS[this.spec.unit](line.values[place])]);
    if (this.spec.limit) told.push([sample("limit"), this.spec.limit.name, UNITS[this.spec.unit](this.spec.limit.values[place])]);
    this.caption.replaceChildren(this.title, ...told.map(([drawn, name, value]) => h("span", {class: "key"}, drawn, `${name} `, h("b", {}, value))));
    this.canvas.setAttribute("aria-label", `${this.spec.title}: ${told.map(([, name, value]) => `${name} ${value}`).join(", ")}`);
  }
}

const sample = kind => svg("svg", {viewBox: "0 0 22 10", "aria-hidden": "true"}, svg("path", {class: kind, d: "M0 5H22"}));

/** Return a line's path; where a value is missing it breaks, and one that stands alone is as wide as its window. */
function path(values, start, end, x, y, half) {
  let d = "", begun = false;
  for (let place = start; place < end; place++) {
    const value = values[place];
    if (value == null) { begun = false; continue; }
    const at = `${x(place).toFixed(1)} ${y(value).toFixed(1)}`;
    if (begun) d += `L${at}`;
    else if (place + 1 < end && values[place + 1] != null) d += `M${at}`;
    else d += `M${(x(place) - half).toFixed(1)} ${y(value).toFixed(1)}h${(2 * half).toFixed(1)}`;
    begun = true;
  }
  return d;
}

function band([low, high], start, end, x, y, half) {
  let d = "";
  for (let place = start; place < end; place++) {
    if (low[place] == null || high[place] == null) continue;
    let last = place;
    while (last + 1 < end && low[last + 1] != null && high[last + 1] != null) last++;
    const up = [], down = [];
    for (let i = place; i <= last; i++) {
      up.push(`${x(i).toFixed(1)} ${y(high[i]).toFixed(1)}`);
      down.unshift(`${x(i).toFixed(1)} ${y(low[i]).toFixed(1)}`);
    }
    if (place === last) {
      const left = (x(place) - half).toFixed(1), right = (x(place) + half).toFixed(1), [top, bottom] = [y(high[place]).toFixed(1), y(low[place]).toFixed(1)];
      d += `M${left} ${top}H${right}V${bottom}H${left}Z`;
    } else d += `M${up.join("L")}L${down.join("L")}Z`;
    place = last;
  }
  return d;
}
