// Keeps the windows that the page knows. Columns of numbers by window, put together from one answer after the other.

export class History {
  constructor() {
    this.columns = {};
    this.pools = {};
    this.first = 0;
    this.count = 0;
    /** @type {Omit<import("./types").TimelineView, "columns" | "pools"> | null} */
    this.about = null;
  }

  /**
   * Take an answer of admin/timeline; returns whether it was of another run than before, whose windows are forgotten.
   * @param {import("./types").TimelineView} answer
   */
  take(answer) {
    const fresh = this.about !== null && (this.about.run !== answer.run || this.about.width !== answer.width);
    if (this.about === null || fresh) Object.assign(this, {columns: {}, pools: {}, first: answer.first, count: 0});
    const {columns, pools, ...about} = answer;
    // The clock of the run's start is reckoned anew by each answer: a shift of milliseconds must not move the axis.
    if (!fresh && this.about?.zero != null && Math.abs(this.about.zero - about.zero) < 1) about.zero = this.about.zero;
    this.about = about;
    if (answer.first < this.first) this.#open(answer.first);
    const length = columns.arrived.length, at = answer.first - this.first;
    this.count = Math.max(this.count, at + length);
    for (const [name, values] of Object.entries(columns)) this.#write(this.columns, name, values, at);
    for (const [pool, parts] of Object.entries(pools)) {
      for (const [part, values] of Object.entries(parts)) this.#write(this.pools[pool] ??= {}, part, values, at);
    }
    if (about.kept != null && this.count > about.kept) this.#forget(this.count - about.kept);
    return fresh;
  }

  get width() { return this.about.width; }
  get start() { return this.first * this.width; }
  get end() { return this.about.now; }

  /** From when on windows may still change: what is to be asked for again. */
  get open() { return Math.max(0, (this.first + this.count - 2) * this.width); }

  /** Seconds of a window that had passed: the last one of a run that is over is shorter. */
  passed(place) { return Math.min(this.width, this.about.now - (this.first + place) * this.width); }

  /** The last window that is shown. One that is being filled would be a plunge; so would the short rest of a run that is over. */
  get last() {
    const end = this.count - 1;
    return Math.max(0, this.about.kind === "live" || this.passed(end) < this.width / 2 ? end - 1 : end);
  }

  /** Return which of the shown windows a moment is in; the last one for the end of a live run. */
  place(moment) { return moment == null ? this.last : Math.min(Math.max(0, Math.floor(moment / this.width) - this.first), this.last); }

  /** The middles of the shown windows, in seconds of the run. */
  get middles() { return Array.from({length: Math.min(this.count, this.last + 1)}, (_, place) => (this.first + place + 0.5) * this.width); }

  value(name, place) { return this.columns[name]?.[place] ?? null; }

  /** Return a column made of others: `make` gets a reader of the columns at one window, and its seconds. */
  made(make) {
    const found = new Array(this.count);
    let place = 0;
    const read = name => this.columns[name]?.[place] ?? null;
    for (; place < this.count; place++) found[place] = make(read, this.passed(place));
    return found;
  }

  #write(home, name, values, at) {
    const column = home[name] ??= [];
    while (column.length < at) column.push(null);
    for (let i = 0; i < values.length; i++) column[at + i] = values[i];
  }

  #open(first) {
    const more = new Array(this.first - first).fill(null);
    for (const home of [this.columns, ...Object.values(this.pools)]) {
      for (const name of Object.keys(home)) home[name] = [...more, ...home[name]];
    }
    this.count += more.length;
    this.first = first;
  }

  #forget(number) {
    for (const home of [this.columns, ...Object.values(this.pools)]) {
      for (const column of Object.values(home)) column.splice(0, number);
    }
    this.first += number;
    this.count -= number;
  }
}

export const per = (part, whole) => part == null || !whole ? null : part / whole;

export const ended = read => ["ok", "failed", "rejected", "expired"].reduce((sum, name) => read(name) == null ? sum : sum + read(name), 0);
