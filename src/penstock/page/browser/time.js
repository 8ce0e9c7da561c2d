// Keeps which moment is shown, and which range of time is drawn. The bar above the charts: play, speed, slider, range.

import {$, clock, h, number, when} from "./dom.js";

const SPEEDS = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000];
const SPANS = [60, 300, 900, 3600, 6 * 3600, 24 * 3600];
const SHORTEST = 60;
/** Seconds that a whole recorded run takes to play, about, at the speed that is set at first. */
const SITTING = 60;

/** The moment: null follows the end of a live run. `changed(what)` is told "range" where charts are to be drawn anew. */
export class Time {
  constructor(history, changed) {
    this.history = history;
    this.changed = changed;
    this.moment = null;
    this.hoverAt = null;
    this.span = null;
    this.playing = false;
    this.frozen = null;
    this.log = false;
    $("play").addEventListener("click", () => this.toggle());
    $("moment").addEventListener("input", ({target}) => this.pin(Number(target.value)));
    $("speed").addEventListener("input", () => this.tell());
    $("span").addEventListener("change", ({target}) => { this.span = Number(target.value) || null; this.changed("range"); });
    $("log").addEventListener("change", ({target}) => { this.log = target.checked; this.changed("range"); });
  }

  get live() { return this.history.about.kind === "live"; }
  get fades() { return !this.live; }
  get speed() { return SPEEDS[Number($("speed").value)]; }
  get end() { return this.live ? this.frozen ?? this.history.end : Math.max(this.history.end, this.history.width); }

  get to() {
    if (this.live || this.span == null) return this.end;
    return Math.min(this.end, Math.max(this.span, this.moment + 0.2 * this.span));
  }

  get from() {
    if (!this.live) return this.span == null ? 0 : Math.max(0, this.to - this.span);
    const known = Math.max(SHORTEST, this.end - this.history.start);
    return this.end - Math.min(known, this.span ?? Infinity);
  }

  begins() {
    if (!this.live) return [];
    return Object.entries(this.history.about.frontends).filter(([, since]) => since > this.history.start + 2 * this.history.width);
  }

  /** Set the controls up for the run that was opened. */
  open() {
    const long = this.live ? this.history.about.kept * this.history.width : this.end;
    const spans = SPANS.filter(span => span < long);
    const text = span => span < 3600 ? `${span / 60} min` : `${span / 3600} h`;
    $("span").replaceChildren(h("option", {value: ""}, this.live ? "all that is kept" : "the whole run"), ...spans.map(span => h("option", {value: span}, text(span))));
    this.span = null;
    this.playing = false;
    this.frozen = null;
    this.moment = this.live ? null : this.end;
    $("speed-label").hidden = this.live;
    const fit = SPEEDS.findIndex(speed => this.end / speed <= SITTING);
    $("speed").value = fit < 0 ? SPEEDS.length - 1 : fit;
    this.tell();
  }

  hover(at) {
    this.hoverAt = at;
    this.changed("hover");
  }

  /** Show a moment and stay there. */
  pin(at) {
    if (this.live && this.frozen == null) this.frozen = this.history.end;
    this.#set(Math.min(Math.max(0, at), this.end));
  }

  /** Follow the end of a live run again. */
  follow() {
    this.frozen = null;
    this.#set(null);
  }

  toggle() {
    if (this.live) return this.moment == null ? this.pin(this.history.end - this.history.width) : this.follow();
    this.playing = !this.playing;
    if (this.playing) {
      if (this.moment >= this.end) this.moment = 0;
      let last = performance.now();
      const step = now => {
        if (!this.playing) return;
        const at = this.moment + Math.max(0, now - last) / 1e3 * this.speed;
        last = now;
        if (at >= this.end) this.playing = false;
        this.#set(Math.min(at, this.end));
        requestAnimationFrame(step);
      };
      requestAnimationFrame(step);
    }
    this.tell();
  }

  #set(moment) {
    const before = [this.from, this.to].join();
    this.moment = moment;
    this.tell();
    this.changed([this.from, this.to].join() === before ? "moment" : "range");
  }

  /** Write what the bar says. */
  tell() {
    const {zero} = this.history.about, {from, end} = this, at = this.moment ?? end, slider = $("moment");
    slider.min = this.live ? from : 0;
    slider.max = end;
    slider.step = this.history.width / 5;
    slider.value = at;
    const shown = this.moment == null ? `now, ${when(at, zero)}` : this.live ? when(at, zero) : `${clock(at)} of ${clock(end)}`;
    slider.setAttribute("aria-valuetext", shown);
    $("moment-text").textContent = this.hoverAt == null ? shown : `at ${when(this.hoverAt, zero)}`;
    $("play").textContent = this.live ? (this.moment == null ? "Pause" : "Go live") : this.playing ? "Pause" : "Play";
    $("speed-text").textContent = `${number(this.speed, 0)}x`;
    $("speed").setAttribute("aria-valuetext", `${this.speed} times as fast as it was`);
  }
}
