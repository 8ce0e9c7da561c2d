// Shows what operators, the planner and the supervisor did as marks on the axis of time, with words for what is looked at.

import {$, h, show, when} from "./dom.js";

/** Pixels within which the pointer is at a mark, and most marks that have their words at once. */
const NEAR = 8, TOLD = 3;

/** The marks above the charts: each is a button, whose words are there at a glance of pointer, focus or screen reader. */
export class Events {
  /** @param {import("./chart.js").View & {history: any}} view */
  constructor(view) {
    this.view = view;
    this.drawn = "";
    /** The mark that the pointer is at. */
    this.pointed = null;
  }

  /**
   * Return the events of the run in its seconds.
   * @returns {{at: number, text: string, bad: boolean}[]}
   */
  get list() {
    const {zero, events = []} = this.view.history.about;
    return zero == null ? [] : events.map(({wall, text, bad}) => ({at: wall - zero, text, bad}));
  }

  /** Put the marks where the range of time has them; those that are there already are kept, and with them the focus. */
  draw() {
    const [from, to] = /** @type {[number, number]} */ (this.view.range), {zero} = this.view;
    const shown = this.list.filter(({at}) => at >= from && at <= to), strip = $("events-strip");
    $("events").hidden = !shown.length;
    const drawn = JSON.stringify(shown);
    if (drawn !== this.drawn) {
      const held = strip.contains(document.activeElement) ? document.activeElement.getAttribute("aria-label") : null;
      show(strip, shown.map(event => {
        const look = pointed => () => { this.pointed = pointed; this.tell(); };
        const mark = h("button", {type: "button", class: event.bad ? "event bad" : "event", "aria-label": `${when(event.at, zero)} ${event.text}`,
          onclick: () => this.view.pinned?.(event.at), onfocus: () => this.tell(), onblur: () => this.tell(), onpointerenter: look(event), onpointerleave: look(null)});
        mark.event = event;
        return mark;
      }));
      this.drawn = drawn;
      [...strip.children].find(one => one.getAttribute("aria-label") === held)?.focus();
    }
    shown.forEach(({at}, i) => { strip.children[i].style.left = `${100 * (at - from) / (to - from)}%`; });
    this.tell();
  }

  /** Say what happened at the mark that is looked at, or near the moment that a chart's pointer is at. */
  tell() {
    const {view} = this, held = document.activeElement, looked = this.pointed ?? ($("events-strip").contains(held) ? held.event : null), [from, to] = /** @type {[number, number]} */ (view.range);
    const near = NEAR * (to - from) / Math.max(1, $("events-strip").clientWidth);
    const told = looked ? [looked] : view.hoverAt == null ? [] : this.list.filter(({at}) => Math.abs(at - view.hoverAt) <= near).slice(-TOLD);
    show($("events-told"), told.length ? told.map(({at, text}) => h("span", {}, h("b", {}, when(at, view.zero)), ` ${text} `))
      : `${this.list.length === 1 ? "one event" : `${this.list.length} events`}: crashes, scalings, drains, settings; point at a mark, or reach it by Tab`);
  }
}
