// Renders a page that is one file: its notes, key figures and sections, from the document that lies in it.

import {ChartFigure, gutter, recolour} from "./chart.js";
import {$, figure, h, note, show, table, themed} from "./dom.js";

/** @type {import("./types").Page} */
const page = JSON.parse($("document").textContent);
/** @type {ChartFigure[]} */
const drawn = [];

/** What the charts of a section share, or one chart has for itself: the pointer, and the range that was zoomed into. */
class Still {
  /** @param {import("./types").Chart[]} charts */
  constructor(charts, shared, zoom = null) {
    this.zero = null;
    this.hoverAt = null;
    this.zoom = zoom;
    const times = shared ? charts.flatMap(chart => chart.series.flatMap(series => [series.at[0], series.at.at(-1)])).filter(at => at != null) : [];
    this.whole = times.length ? [Math.min(...times), Math.max(...times, Math.min(...times) + 1)] : null;
    this.gutter = shared ? Math.max(...charts.map(gutter)) : null;
    this.figures = charts.map(chart => new ChartFigure(() => chart, this));
  }

  get range() { return this.zoom ?? this.whole; }
  get at() { return this.hoverAt; }

  hovered(at) {
    this.hoverAt = at;
    for (const each of this.figures) each.mark();
  }

  zoomed(range) {
    this.zoom = range;
    for (const each of this.figures) each.draw();
  }
}

function section({heading, text = [], charts = [], tables = [], files = [], shared, zoom}) {
  const views = shared ? [new Still(charts, true, zoom)] : charts.map(chart => new Still([chart], false));
  const figures = views.flatMap(view => view.figures);
  drawn.push(...figures);
  return h("section", {},
    h("h2", {}, heading), text.map(line => h("p", {}, line)),
    figures.length ? h("div", {class: shared ? "charts lanes" : "charts tall"}, figures.map(each => each.element)) : null,
    tables.map(each => h("div", {class: "panel"}, each.folded ? h("details", {}, h("summary", {}, each.caption), table(each)) : table(each))),
    files.length ? h("p", {class: "soft"}, "Data as CSV: ", files.flatMap((file, i) => [i ? ", " : "", h("a", {href: file}, file)])) : null);
}

document.title = page.title;
$("name").textContent = page.title;
$("about").textContent = page.about;
show(document.querySelector("main"), (page.notes ?? []).map(note),
  page.figures?.length ? h("section", {class: "figures"}, page.figures.map(figure)) : null, page.sections.map(section));
themed(() => {
  recolour();
  for (const each of drawn) each.draw();
});
new ResizeObserver(() => { for (const each of drawn) each.draw(); }).observe(document.querySelector("main"));
