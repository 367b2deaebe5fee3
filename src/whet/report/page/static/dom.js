// Creates elements. Names, logs and samples of a run may be untrusted. They are inserted as text, never as markup, and
// characters that reverse or hide other text are replaced.

// Control characters except tab and newline, and characters that change the direction of text.
const UNSEEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]/g;

/** Returns the children without null, undefined and false, with invisible characters in text replaced. */
function visible(children) {
  return children
    .flat(Infinity)
    .filter((child) => child !== null && child !== undefined && child !== false)
    .map((child) => (child instanceof Node ? child : String(child).replace(UNSEEN, "\ufffd")));
}

/** Creates an element with attributes, handlers ("onclick"), CSS properties ("style"), and text or elements inside. */
export function el(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "style") for (const [key, css] of Object.entries(value)) made.style.setProperty(key, css);
    else if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else made.setAttribute(name, value === true ? "" : String(value));
  }
  made.append(...visible(children));
  return made;
}

/** Replaces all children of an element. */
export function fill(element, ...children) {
  element.replaceChildren(...visible(children));
  return element;
}

/** Makes these elements the children of an element, in this order. Elements that are already in order are not moved, so
 * that a click in progress is not lost. The focus is kept. */
export function arrange(element, wanted) {
  const kept = new Set(wanted);
  const focused = document.activeElement;
  for (const child of [...element.children]) if (!kept.has(child)) child.remove();
  wanted.forEach((child, place) => {
    const there = element.children[place] ?? null;
    if (there === child) return;
    // If an element moves down, move it alone, instead of moving up all elements after it.
    if (there?.nextElementSibling === child) element.append(there);
    else element.insertBefore(child, there);
  });
  if (focused !== document.activeElement && element.contains(focused)) focused.focus({ preventScroll: true });
}

/** Creates a table. Cells are text or elements. The first cell of each row is its header. */
export function table(header, rows, attributes = {}) {
  const head = el(
    "thead",
    {},
    el(
      "tr",
      {},
      header.map((cell) => el("th", { scope: "col" }, cell)),
    ),
  );
  const body = rows.map((row) =>
    el(
      "tr",
      {},
      row.map((cell, place) =>
        place === 0 ? el("th", { scope: "row" }, cell) : el("td", { "data-label": textOf(header[place]) }, cell),
      ),
    ),
  );
  return el("table", attributes, head, el("tbody", {}, body));
}

function textOf(cell) {
  return typeof cell === "string" ? cell : (cell?.textContent ?? "");
}

/** Creates a collapsed section, whose content is created each time it is opened. */
export function disclosure(summary, make, attributes = {}) {
  const inside = el("div", { class: "inside" });
  const details = el("details", attributes, el("summary", {}, summary), inside);
  details.addEventListener("toggle", () => {
    if (details.open) fill(inside, make());
  });
  return details;
}

/** Creates a section of the page: a heading, a sentence that explains the content, and the content. */
export function section(id, title, sentence, ...children) {
  return el(
    "section",
    { id, class: "part", "aria-labelledby": `${id}-title` },
    el("header", { class: "part-head" }, el("h2", { id: `${id}-title` }, title), el("p", { class: "caption" }, sentence)),
    ...children,
  );
}

/** Creates a small label with a tone: good, plain, live, warn or bad. */
export function pill(words, tone = "plain") {
  return el("span", { class: `pill ${tone}` }, words);
}
