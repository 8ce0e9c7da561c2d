// Makes elements and writes numbers. No markup is ever parsed: what comes from elsewhere stays text.

/** @type {(id: string) => any} */
export const $ = id => document.getElementById(id);

/** Make an element with attributes, listeners (onclick) and children; what is null or false is left out. */
export function h(tag, attributes, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value == null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  show(element, ...children);
  return element;
}

/** Put children into an element in place of what it had. */
export function show(element, ...children) {
  element.replaceChildren(...children.flat(Infinity).filter(child => child != null && child !== false));
}

/** Put a list in the place of an older one; a button of it that had the focus has it again, where it is still there. */
export function replace(element, list) {
  const held = element.contains(document.activeElement) ? document.activeElement.textContent : null;
  show(element, list);
  if (held != null) [...element.querySelectorAll("button")].find(button => button.textContent === held)?.focus();
}

export const NONE = "–";

/** Round as Python writes numbers, and with it the reasons of records: the exact value, and halves to the even digit. */
function rounded(value, digits) {
  const whole = 10 ** digits, isHalf = Math.abs(value * 2 ** (digits + 1) % 2) === 1;
  return isHalf ? 2 * Math.round(value * whole / 2) / whole : Number(value.toFixed(digits));
}

/** Write a number with `digits` decimals at most, or with so many in any case where it is `fixed`. */
export const number = (value, digits = 1, fixed = false) => value == null ? NONE
  : rounded(Number(value), digits).toLocaleString("en", {minimumFractionDigits: fixed ? digits : 0, maximumFractionDigits: digits});
export const percent = value => value == null ? NONE : `${number(100 * value, 1, true)} %`;
export const rate = value => value == null ? NONE : `${number(value, value < 10 ? 2 : value < 100 ? 1 : 0)}/s`;

export function seconds(value) {
  if (value == null) return NONE;
  if (value > 0 && value < 0.0000995) return `${number(1e6 * value, 1)} µs`;
  if (value < 0.9995) return `${(1e3 * value).toFixed(value < 0.00995 ? 1 : 0)} ms`;
  if (value < 120) return `${value.toFixed(value < 9.95 ? 2 : 1)} s`;
  return value < 7200 ? `${(value / 60).toFixed(0)} min` : `${(value / 3600).toFixed(1)} h`;
}

const two = value => String(Math.floor(value)).padStart(2, "0");

/** Write a length of time as h:mm:ss. */
export const clock = at => `${Math.floor(at / 3600)}:${two(at / 60 % 60)}:${two(at % 60)}`;

/** Write a moment of the run: by the clock where it is known when the run began, else since its start. */
export function when(at, zero, short = false) {
  if (zero == null) return clock(Math.max(0, at));
  const date = new Date(1e3 * (zero + at));
  const text = `${two(date.getHours())}:${two(date.getMinutes())}`;
  return short ? text : `${text}:${two(date.getSeconds())}`;
}

export const target = found => Array.isArray(found) ? (found[1] ? `${found[0]}/${found[1]}` : String(found[0])) : String(found ?? NONE);

const column = kind => name => ({name, kind});
export const quantity = column("number"), text = column("text"), long = column("long");

/** Columns from which on a table is wide: the style makes each of its rows a card where it has not so much room. */
const WIDE = 7;

/**
 * Make a table of the page's schema; a cell of a live page may be an element as well.
 * @param {import("./types").Table} table
 */
export function table({caption, head, rows, empty = "nothing"}) {
  if (!rows.length) return h("p", {class: "empty"}, empty);
  const styles = head.map(({kind}) => ({text: "left", long: "left wrap"})[kind] ?? null);
  return h("table", {class: head.length > WIDE && "wide"}, h("caption", {class: "hidden"}, caption),
    h("thead", {}, h("tr", {}, head.map(({name}, i) => h("th", {scope: "col", class: styles[i] && "left"}, name)))),
    h("tbody", {}, rows.map(({cells, id, chosen, more}) => h("tr", {id: id || null, class: chosen ? "chosen" : null}, cells.map((cell, i) =>
      h("td", {class: styles[i], "data-name": head[i].name}, cell, more && i === cells.length - 1 ? h("details", {}, h("summary", {}, more.caption), table(more)) : null))))));
}

/** @param {import("./types").KeyFigure} figure */
export const figure = ({name, value, note}) => h("div", {class: "figure"}, h("b", {}, value), h("small", {}, name), note ? h("small", {}, note) : null);

/** @param {import("./types").PageNote} note */
export const note = ({level, text, hint}) => h("div", {class: `note ${level}`}, text, hint ? h("small", {}, hint) : null);

const THEMES = ["system", "light", "dark"];

/** Let the button choose a theme; `redraw` is called whenever the colours have changed. */
export function themed(redraw) {
  const dark = matchMedia("(prefers-color-scheme: dark)"), kept = localStorage.getItem("theme");
  const choose = name => {
    if (name === "system") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = name;
    $("theme").textContent = `Theme: ${name}`;
    localStorage.setItem("theme", name);
    redraw();
  };
  $("theme").addEventListener("click", () => choose(THEMES[(THEMES.indexOf(localStorage.getItem("theme")) + 1) % THEMES.length]));
  dark.addEventListener("change", redraw);
  choose(THEMES.includes(kept) ? kept : "system");
}

/**
 * Ask the server; raises with a sentence where it does not answer as it should.
 * @returns {Promise<any>}
 */
export async function get(path) {
  const answer = await fetch(path, {cache: "no-store", signal: AbortSignal.timeout(8000)});
  const body = await answer.json();
  if (!answer.ok) throw new Error(body?.error?.message ?? `${path} answered ${answer.status}`);
  return body;
}
