// How is an element made, and how is a number written? No markup is ever parsed: what comes from elsewhere stays text.

const SVG = "http://www.w3.org/2000/svg";

export const $ = id => document.getElementById(id);

function filled(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value == null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat().filter(child => child != null && child !== false));
  return element;
}

export const h = (tag, attributes, ...children) => filled(document.createElement(tag), attributes, children);
export const svg = (tag, attributes, ...children) => filled(document.createElementNS(SVG, tag), attributes, children);

/** Put children into an element in place of what it had. */
export function show(element, ...children) {
  element.replaceChildren(...children.flat().filter(child => child != null && child !== false));
}

/** Put a list in the place of an older one; a button of it that had the focus has it again, where it is still there. */
export function replace(element, list) {
  const held = element.contains(document.activeElement) ? document.activeElement.textContent : null;
  show(element, list);
  if (held != null) [...element.querySelectorAll("button")].find(button => button.textContent === held)?.focus();
}

export const NONE = "–";

export const number = (value, digits = 1) => value == null ? NONE : Number(value).toLocaleString("en", {maximumFractionDigits: digits});
export const percent = value => value == null ? NONE : `${(100 * value).toFixed(1)} %`;
export const rate = value => value == null ? NONE : `${number(value, value < 10 ? 2 : value < 100 ? 1 : 0)}/s`;

export function seconds(value) {
  if (value == null) return NONE;
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

/** Make a table. Heads that begin with < stand to the left; a row is {cells, cls, wrap: index of the cell that may wrap}. */
export function table(caption, heads, rows, empty) {
  if (!rows.length) return h("p", {class: "empty"}, empty);
  const left = heads.map(head => head[0] === "<");
  return h("table", {}, h("caption", {class: "hidden"}, caption),
    h("thead", {}, h("tr", {}, heads.map((head, i) => h("th", {scope: "col", class: left[i] ? "left" : null}, head.replace(/^</, ""))))),
    h("tbody", {}, rows.map(row => h("tr", {class: row.cls}, row.cells.map((cell, i) =>
      h("td", {class: [left[i] ? "left" : "", row.wrap === i ? "wrap" : ""].join(" ").trim() || null}, cell))))));
}

/** Ask the server; raises with a sentence where it does not answer as it should. */
export async function get(path) {
  const answer = await fetch(path, {cache: "no-store", signal: AbortSignal.timeout(8000)});
  const body = await answer.json();
  if (!answer.ok) throw new Error(body?.error?.message ?? `${path} answered ${answer.status}`);
  return body;
}
