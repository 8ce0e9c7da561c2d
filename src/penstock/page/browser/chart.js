// Draws one chart of the page's schema with uPlot; a view says which time is drawn, and which moment is pointed at.

import {clock, h, NONE, number, percent, rate, seconds, show, when} from "./dom.js";
import uPlot from "./uplot.js";

/** @typedef {import("./types").Chart} Chart */
/** @typedef {import("./types").Series} Series */

/**
 * What charts of one time axis share. `range` is null where each shows all that it has, `zero` the clock at second 0 of the
 * run where it is known, `at` the moment whose numbers are told, `moment` the one that was chosen, `fades` whether what comes
 * after it does, `begins` the moments from which on a counter is new, and `events` those at which something happened. A view without `zoomed` can't be zoomed. `gutter` is
 * the room to the left of charts that stand below each other.
 * @typedef {{range: [number, number] | null, zero: number | null, hoverAt: number | null, at: number | null,
 *   moment?: number | null, fades?: boolean, begins?: () => [string, number][],
 *   events?: () => {at: number, bad: boolean}[], gutter?: number | null, hovered: (at: number | null) => void, pinned?: (at: number) => void, zoomed?: (range: [number, number] | null) => void}} View
 */

const ROW = 24, NEAR = 8, NOTES = 3, FONT = "11px system-ui, sans-serif";
const STEPS = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400, 172800, 604800];
/** @type {import("./types").Series["colour"][]} */
const COLOURS = ["s0", "s1", "s2", "s3", "s4", "s5"];
/** Distances of an axis' ticks: whole ones where things are counted. */
const INCREMENTS = Array.from({length: 60}, (_, i) => [1, 2, 5][i % 3] * 10 ** (Math.floor(i / 3) - 6));
const DASHES = {s1: [5, 3], s2: [2, 2], s3: [8, 3, 2, 3], s4: [10, 3], s5: [1, 3]};
const short = value => value < 10000 ? number(value, value < 1 ? 3 : 1) : value < 1e6 ? `${number(value / 1e3, 1)}k` : `${number(value / 1e6, 1)}M`;
/** How a number is told, and how an axis writes it: there is room for eight characters. */
const TOLD = {share: percent, seconds, rate, count: value => number(value, value < 10 ? 2 : 0), hours: value => number(value, 2), time: value => value == null ? NONE : clock(value)};
const TICKS = {share: value => `${number(100 * value, 1)} %`, seconds: value => value ? seconds(value).replace(/\.0+ /, " ") : "0 s", rate: value => `${short(value)}/s`, count: short, hours: short, time: clock};
/** Smallest upper end of an axis by unit, so that noise of nothing does not fill it. */
const LEAST = {share: 1, seconds: 0.01, rate: 1, count: 4, hours: 0.01, time: 1};
/** What is not above it has no place on an axis of logarithms. */
const POSITIVE = 1e-100;

let inks = {};
const probe = h("i", {hidden: true});

/** Return a colour of the style as the theme has it now. */
function ink(name) {
  if (!probe.isConnected) document.body.append(probe);
  probe.style.color = `var(--${name})`;
  return inks[name] ??= getComputedStyle(probe).color;
}

/** Forget the colours: the theme has changed, and all charts are to be drawn anew. */
export function recolour() { inks = {}; }

function decades(low, high) {
  const found = [];
  for (let power = Math.floor(Math.log10(low)); 10 ** power <= high * 1.001; power++) {
    for (const factor of high / low > 200 ? [1] : [1, 2, 5]) {
      if (factor * 10 ** power >= low * 0.999 && factor * 10 ** power <= high * 1.001) found.push(factor * 10 ** power);
    }
  }
  return found;
}

/**
 * Return the value of a series at a moment: a step holds until the next, else it is the nearest one's.
 * @param {Series} series
 * @param {number | null} moment
 */
function reading({at, values, drawn}, moment) {
  if (moment == null || !at.length) return null;
  let low = -1, high = at.length;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (at[middle] <= moment) low = middle; else high = middle;
  }
  if (drawn === "steps" || drawn === "spans") return low < 0 ? null : values[low];
  return values[low < 0 || (high < at.length && at[high] - moment <= moment - at[low]) ? high : low];
}

/** Return which points of a series stand between gaps: a line would not show them. */
function alone(plot, series) {
  const values = plot.data[series], known = [];
  values.forEach((value, i) => { if (value !== undefined) known.push(i); });  // undefined: a point of another series alone
  return known.filter((i, k) => values[i] != null && values[known[k - 1]] == null && values[known[k + 1]] == null);
}

/**
 * Return the pixels that a chart's numbers or names take to the left of it.
 * @param {Chart} chart
 */
export const gutter = ({kind, names = []}) => kind === "bars" || kind === "lanes" ? Math.min(kind === "bars" ? 220 : 150, 18 + 6.2 * Math.max(...names.map(name => name.length), 6)) : 54;

export class ChartFigure {
  /**
   * @param {() => Chart} make makes what is shown at each draw
   * @param {View} view
   */
  constructor(make, view) {
    this.make = make;
    this.view = view;
    this.plot = null;
    this.near = [];
    this.title = h("h3");
    this.keys = h("p", {class: "keys"});
    this.pointed = h("p", {class: "pointed"});
    this.canvas = h("div", {class: "plot", role: "img"});
    this.element = h("figure", {class: "chart"}, h("figcaption", {}, this.title, this.keys), this.canvas, this.pointed);
    this.element.figure = this;
    let downAt = 0;
    this.canvas.addEventListener("pointerdown", event => { downAt = event.clientX; });
    this.canvas.addEventListener("click", event => { if (Math.abs(event.clientX - downAt) < 3) this.#clicked(); });
    this.canvas.addEventListener("dblclick", () => view.zoomed?.(null));
  }

  get #offset() { return this.chart.x.unit === "time" ? this.view.zero ?? 0 : 0; }

  /** Draw everything anew; `mark` alone moves the moments. */
  draw() {
    const chart = this.chart = this.make();
    const {kind = "lines", names = [], notes = [], x = {}, y = {}} = chart;
    Object.assign(chart, {kind, names, notes, x, y, marks: chart.marks ?? []});
    chart.series.forEach((series, i) => { series.colour ||= series.limit ? "bad" : COLOURS[i % COLOURS.length]; });
    show(this.title, chart.title, " ", h("span", {class: "soft"}, chart.about ?? ""), chart.csv ? [" ", h("a", {href: chart.csv}, "CSV")] : null);
    this.pointed.hidden = !notes.length;
    if (kind !== "lines") this.canvas.style.height = `${ROW * names.length + 30}px`;
    const {clientWidth: width, clientHeight: height} = this.canvas;
    if (!width) return;
    const data = this.#columns();
    const shape = JSON.stringify([kind, names, x, y, this.view.zero == null, chart.band, chart.series.map(({at, values, ...rest}) => rest)]);
    if (shape !== this.shape) {
      this.plot?.destroy();
      this.shape = shape;
      this.plot = new (/** @type {any} */ (uPlot))(this.#options(width, height), data, this.canvas);
      this.over = {veil: h("div", {class: "veil"}), at: h("div", {class: "at"}), none: h("p", {class: "none"})};
      this.plot.over.append(...Object.values(this.over));
    } else {
      if (this.plot.width !== width) this.plot.setSize({width, height});
      this.plot.setData(data);
    }
    for (const old of this.plot.over.querySelectorAll(".began")) old.remove();
    for (const [name, since] of this.view.begins?.() ?? []) {
      const left = this.plot.valToPos(since + this.#offset, "x");
      if (left <= 0 || left >= this.plot.over.clientWidth) continue;
      const line = h("div", {class: left > this.plot.over.clientWidth - 140 ? "began late" : "began"}, h("span", {}, name));
      line.style.left = `${left}px`;
      this.plot.over.append(line);
    }
    const [first, last] = kind === "bars" ? [-Infinity, Infinity] : [this.plot.scales.x.min, this.plot.scales.x.max];
    const drawn = chart.series.some((series, i) => !series.limit && data[i + 1].some((value, n) => value != null && data[0][n] >= first && data[0][n] <= last));
    this.over.none.textContent = drawn ? "" : chart.empty ?? "nothing was measured";
    this.mark();
  }

  /** Move the moments, and tell the numbers of the one that is looked at. */
  mark() {
    if (!this.plot) return;
    const {view, plot, chart} = this, place = at => plot.valToPos(at + this.#offset, "x"), width = plot.over.clientWidth;
    if (chart.kind !== "bars") plot.setCursor({left: view.hoverAt == null ? -10 : place(view.hoverAt), top: view.hoverAt == null ? -10 : 0}, false);
    const left = view.moment == null ? -1 : place(view.moment), marked = left >= 0 && left <= width + 0.5;
    this.over.at.hidden = !marked;
    this.over.veil.hidden = !marked || !view.fades;
    if (marked) this.over.at.style.left = this.over.veil.style.left = `${left}px`;
    const {names, kind} = chart, told = new Map();
    for (const series of chart.series.filter(series => series.drawn !== "hidden" && series.at.length)) {
      const value = kind === "bars" ? series.values[plot.cursor.idx] : reading(series, view.at);
      if (kind !== "lanes") told.set(series.name, [series, (kind === "bars" ? plot.cursor.idx : view.at) == null ? "" : TOLD[chart.y.unit ?? "count"](value)]);
      else told.set(series.name, [series, [told.get(series.name)?.[1], series.drawn === "spans" && value != null ? names[value] : ""].filter(Boolean).join(", ")]);
    }
    const one = told.size === 1 && [...told.values()][0][1] === "";
    show(this.keys, one ? [] : [...told].map(([name, [series, value]]) => h("span", {class: "key"}, h("i", {class: `swatch ${series.colour} ${series.drawn ?? "line"}`}), `${name} `, h("b", {}, value))));
    this.near = view.hoverAt == null ? [] : chart.notes.map(note => {
      const [x, from, until] = [view.hoverAt, note.at, note.until ?? note.at].map(place);
      return {note, far: Math.max(0, from - x, x - until)};
    }).filter(({far}) => far <= NEAR).sort((a, b) => a.far - b.far).slice(0, NOTES).map(({note}) => note);
    this.pointed.textContent = this.near.map(({text}) => text).join(" · ");
    this.canvas.setAttribute("aria-label", `${chart.title}: ${[...told].map(([name, [, value]]) => `${name} ${value}`).join(", ")}`);
  }

  /** Give back what the library holds for the chart: it listens to the whole window. */
  end() { this.plot?.destroy(); }

  #clicked() {
    const link = this.near.find(note => note.link)?.link;
    if (link) location.hash = link;
    else if (this.view.hoverAt != null) this.view.pinned?.(this.view.hoverAt);
  }

  /** Return the columns that uPlot draws: all x, then each series' values. */
  #columns() {
    const {series, x, y} = this.chart, offset = this.#offset;
    const tables = series.map(({at, values}) => {
      const kept = x.log ? at.map((_, i) => i).filter(i => at[i] > POSITIVE) : null;
      const ys = y.log ? values.map(value => value > POSITIVE ? value : null) : values;
      return kept ? [kept.map(i => at[i]), kept.map(i => ys[i])] : [at, ys];
    });
    const same = tables.every(([at]) => at === tables[0][0]);
    const data = !tables.length ? [[]] : same ? [tables[0][0], ...tables.map(([, values]) => values)] : uPlot.join(tables);
    return offset ? [data[0].map(at => at + offset), ...data.slice(1)] : data;
  }

  #across(low, high) {
    const {chart, view} = this;
    if (chart.kind === "bars") return [-0.5, chart.names.length - 0.5];
    if (view.range) return view.range.map(at => at + this.#offset);
    const marks = chart.marks.filter(mark => mark.axis === "x").map(mark => mark.at);
    if (low == null) [low, high] = marks.length ? [Math.min(...marks), Math.max(...marks)] : [chart.x.log ? 1 : 0, 1];
    [low, high] = [Math.min(low, ...marks), Math.max(high, ...marks)];
    if (chart.x.log) [low, high] = [10 ** Math.floor(Math.log10(low)), 10 ** Math.ceil(Math.log10(high))];
    return low < high ? [low, high] : chart.x.log ? [low, 10 * low] : [low, low + 1];
  }

  #up(low, high) {
    const {kind, names, y, marks} = this.chart, unit = y.unit ?? "count";
    if (kind === "lanes") return [-0.5, names.length - 0.5];
    const limits = marks.filter(mark => mark.axis === "y").map(mark => mark.at);
    if (y.log) return low == null ? [0.001, 1] : [low / 1.2, Math.max(1.25 * high, 10 * low / 1.2)];
    if (kind === "bars") return [0, high > 0 ? 1.05 * high : 1];
    return [Math.min(0, low ?? 0), unit === "share" ? 1.02 : Math.max(LEAST[unit], 1.06 * Math.max(high ?? 0, ...limits))];
  }

  #options(width, height) {
    const {view, chart} = this, {kind, names, x, y} = chart, clocked = x.unit === "time" && view.zero != null;
    const lined = {stroke: () => ink("soft"), font: FONT, labelFont: FONT, labelSize: 18, labelGap: 0, ticks: {show: false}, gap: 6};
    const grid = {stroke: () => ink("grid"), width: 1};
    const named = {splits: () => names.map((_, i) => i), values: () => names, size: gutter(chart), grid: {show: false}};
    const logged = {splits: (_, __, low, high) => decades(low, high), filter: (_, splits) => splits};
    /** @param {import("./types").Axis} axis */
    const written = ({unit = "count", label, log}) => ({...lined, grid, label: label || undefined, incrs: INCREMENTS.filter(step => unit !== "count" || step >= 1), values: (_, splits) => splits.map(TICKS[unit]), ...(log ? logged : {})});
    const timed = x.unit !== "time" ? {} : {incrs: STEPS, space: 74, values: (_, splits, __, ___, step) => splits.map(at => when(at - this.#offset, view.zero, step >= 60))};
    const bars = kind === "bars";
    const across = bars ? {...written({...y, label: y.label}), scale: "y", side: 2, size: 26, space: 60} : {...written(x), ...timed, size: 26};
    const upward = kind === "lines" ? {...written(y), size: view.gutter ?? gutter(chart)} : {...lined, ...named, ...(bars ? {scale: "x", side: 3} : {size: view.gutter ?? gutter(chart)})};
    return {
      width, height, padding: [8, 22, 0, 0], legend: {show: false},
      cursor: {x: !bars, y: false, drag: {x: !!view.zoomed && !bars, y: false, setScale: false}, points: {size: 6, show: !bars && kind !== "lanes"}, bind: {dblclick: () => null}},
      scales: {
        x: {time: clocked, distr: x.log ? 3 : 1, range: (_, low, high) => this.#across(low, high), ...(bars ? {ori: 1, dir: -1} : {})},
        y: {distr: y.log ? 3 : 1, range: (_, low, high) => this.#up(low, high), ...(bars ? {ori: 0, dir: 1} : {}), ...(kind === "lanes" ? {dir: -1} : {})},
      },
      axes: bars ? [upward, across] : [across, upward],
      series: [{}, ...chart.series.map(series => this.#series(series))],
      bands: chart.band ? [{series: [chart.band[1] + 1, chart.band[0] + 1], fill: () => ink(chart.series[chart.band[0]].colour).replace(/^rgb\((.*)\)$/, "rgba($1, .2)")}] : [],
      hooks: {
        setCursor: [plot => {
          if (bars) this.mark();
          else view.hovered(plot.cursor.left < 0 ? null : plot.posToVal(plot.cursor.left, "x") - this.#offset);
        }],
        setSelect: [plot => {
          const {left, width: wide} = plot.select;
          const at = px => plot.posToVal(px, "x") - this.#offset;
          if (wide > 2) view.zoomed?.([at(left), at(left + wide)]);
          plot.setSelect({left: 0, top: 0, width: 0, height: 0}, false);
        }],
        draw: [plot => this.#lines(plot)],
      },
    };
  }

  /** @param {Series} series */
  #series({name, at, drawn = "line", colour, limit}) {
    const dense = at.length > this.canvas.clientWidth / 2;
    const stroke = () => ink(colour), paths = uPlot.paths;
    if (this.chart.kind === "bars") return {label: name, fill: stroke, width: 0, points: {show: false}, paths: paths.bars({size: [0.66, 40]})};
    const points = {show: drawn === "points", filter: drawn === "points" ? undefined : alone, size: drawn === "points" ? 9 : 3, fill: stroke, stroke};
    if (drawn === "hidden") return {label: name, width: 0, points: {show: false}};
    if (drawn === "points") return {label: name, stroke, points, paths: () => null};
    if (drawn === "spans") return {label: name, stroke, width: 12, cap: "butt", points: {show: false}};
    return {label: name, stroke, points, width: dense ? 1 : 1.7, dash: limit ? [6, 4] : DASHES[colour], ...(drawn === "steps" ? {paths: paths.stepped({align: 1})} : {})};
  }

  /** Draw the marks, and write the names of marks and limits. */
  #lines(plot) {
    const {ctx} = plot, {left, top, width, height} = plot.bbox, scale = uPlot.pxRatio;
    ctx.save();
    ctx.strokeStyle = ctx.fillStyle = ink("bad");
    ctx.lineWidth = 1.5 * scale;
    ctx.font = `600 ${11 * scale}px system-ui, sans-serif`;
    ctx.setLineDash([5 * scale, 4 * scale]);
    const offset = this.#offset;
    for (const {at, bad} of this.view.events?.() ?? []) {
      const place = plot.valToPos(at + offset, "x", true);
      if (place < left || place > left + width) continue;
      ctx.save();
      ctx.strokeStyle = ink(bad ? "bad" : "accent");
      ctx.lineWidth = scale;
      ctx.setLineDash([2 * scale, 3 * scale]);
      ctx.beginPath();
      ctx.moveTo(place, top);
      ctx.lineTo(place, top + height);
      ctx.stroke();
      ctx.restore();
    }
    const above = (name, y) => {
      ctx.textAlign = "right";
      ctx.fillText(name, left + width - 4 * scale, y < top + 16 * scale ? y + 14 * scale : y - 5 * scale);
    };
    for (const {name, at, axis} of this.chart.marks) {
      const place = plot.valToPos(at + (axis === "x" ? this.#offset : 0), axis, true);
      ctx.beginPath();
      if (axis === "y") {
        ctx.moveTo(left, place);
        ctx.lineTo(left + width, place);
        above(name, place);
      } else if (place >= left && place <= left + width) {
        ctx.moveTo(place, top);
        ctx.lineTo(place, top + height);
        const late = place > left + width / 2;
        ctx.textAlign = late ? "right" : "left";
        ctx.fillText(name, place + (late ? -5 : 5) * scale, top + height - 8 * scale);
      }
      ctx.stroke();
    }
    for (const {name, at, values, limit} of this.chart.series) {
      const last = limit ? values.findLast((value, i) => value != null && at[i] + this.#offset <= plot.scales.x.max) : null;
      if (last != null) above(`${name} ${TOLD[this.chart.y.unit ?? "count"](last)}`, plot.valToPos(last, "y", true));
    }
    ctx.restore();
  }
}
