// The list of runs, with a filter, sorting, and checkboxes that select runs to compare.
import { arrange, el, fill } from "./dom.js";
import { statePill } from "./summary.js";
import { formatCount, formatNumber, formatSeconds } from "./format.js";

const AT_ONCE = 200;
const MOST_COMPARED = 12;
// Labels of the cells on a narrow screen.
const FIGURES = [null, "steps", "loss", "", "", "updated"];
const COLUMNS = [
  ["run", (line) => line.name.toLowerCase(), 1],
  ["state", (line) => line.state, 1],
  ["steps", (line) => line.step, -1],
  ["loss", (line) => line.loss ?? Infinity, 1],
  ["curve", (line) => line.loss ?? Infinity, 1],
  ["goal", goalRank, -1],
  ["updated", (line) => line.updated, -1],
];

export class RunList {
  constructor(folder) {
    this.lines = new Map();
    this.rows = new Map();
    this.chosen = new Set();
    this.sorted = ["updated", -1];
    this.shown = AT_ONCE;
    this.filter = el("input", {
      type: "search",
      placeholder: "filter by name, recipe or state",
      "aria-label": "filter",
      oninput: () => ((this.shown = AT_ONCE), this.draw()),
    });
    this.count = el("span", { class: "caption", role: "status" });
    this.compare = el("a", { class: "quiet go", hidden: true }, "compare");
    this.folder = folder;
    this.ahead = 0;
    this.groups = el("div", {});
    this.body = el("tbody", {});
    this.heads = COLUMNS.map(([name]) =>
      el(
        "th",
        { scope: "col" },
        el("button", { type: "button", class: "sort", onclick: () => this.sortBy(name) }, name),
      ),
    );
    this.more = el(
      "button",
      { type: "button", class: "quiet", hidden: true, onclick: () => ((this.shown += AT_ONCE), this.draw()) },
      "show more",
    );
    this.element = el(
      "div",
      { class: "hero" },
      el("h1", {}, "Runs"),
      el("p", { class: "lead" }, folder ? `In ${folder}. Select one to see it, or check several to compare them.` : ""),
      el("div", { class: "tools" }, this.filter, this.count, this.compare),
      el(
        "div",
        { class: "card" },
        el(
          "table",
          { class: "plain stacked runs" },
          el("thead", {}, el("tr", {}, el("th", {}, el("span", { class: "unseen" }, "compare")), this.heads)),
          this.body,
        ),
      ),
      this.more,
      this.groups,
    );
  }

  /** Applies changes of runs, and of folders that contain more runs. */
  update({ runs, removed, groups, now }) {
    // Times are from the clock of the server, which may be another machine.
    this.ahead = now - Date.now() / 1000;
    const known = JSON.stringify(groups);
    if (known !== this.known) fill(this.groups, groups.map((one) => this.group(one)));
    else if (!runs.length && !removed.length) return;
    this.known = known;
    for (const line of runs) this.lines.set(line.id, line);
    for (const id of removed) this.lines.delete(id);
    for (const table of [this.rows, this.chosen])
      for (const id of table.keys()) if (!this.lines.has(id)) table.delete(id);
    this.draw();
  }

  /** Creates a line for a folder with more runs, such as those of a search, with the command that shows them. */
  group({ name, number }) {
    const path = `${this.folder}/${name}`;
    const quoted = /^[\w@%+=:,./-]+$/.test(path) ? path : `'${path.replaceAll("'", `'"'"'`)}'`;
    return el("p", { class: "caption group" }, `${path} contains ${formatCount(number)} more: `, el("code", {}, `whet watch ${quoted}`));
  }

  sortBy(name) {
    const first = COLUMNS.find(([column]) => column === name)[2];
    this.sorted = [name, this.sorted[0] === name ? -this.sorted[1] : first];
    this.draw();
  }

  choose(id, isChosen) {
    if (isChosen && this.chosen.size < MOST_COMPARED) this.chosen.add(id);
    else this.chosen.delete(id);
    this.draw();
  }

  draw() {
    const words = this.filter.value.toLowerCase().split(/\s+/).filter(Boolean);
    const [name, direction] = this.sorted;
    const key = COLUMNS.find(([column]) => column === name)[1];
    const found = [...this.lines.values()].filter((line) =>
      words.every((word) => `${line.name} ${line.recipe ?? ""} ${line.state}`.toLowerCase().includes(word)),
    );
    found.sort((a, b) => direction * compareKeys(key(a), key(b)) || compareKeys(a.name, b.name));
    COLUMNS.forEach(([column], place) =>
      this.heads[place].setAttribute(
        "aria-sort",
        column === name ? (direction > 0 ? "ascending" : "descending") : "none",
      ),
    );
    arrange(
      this.body,
      found.slice(0, this.shown).map((line) => this.row(line)),
    );
    fill(
      this.count,
      this.lines.size
        ? `${formatCount(found.length)} of ${formatCount(this.lines.size)}`
        : "No runs yet. They appear here when training starts.",
    );
    this.more.hidden = found.length <= this.shown;
    this.compare.hidden = this.chosen.size < 2;
    this.compare.textContent = `compare ${this.chosen.size} runs`;
    this.compare.href = `#/compare/${[...this.chosen].join(",")}`;
  }

  /** Updates the ages of all runs. */
  tick() {
    for (const [id, { figures }] of this.rows) fill(figures.at(-1), this.ageOf(this.lines.get(id)));
  }

  ageOf(line) {
    return `${formatSeconds(Math.max(0, Math.round(Date.now() / 1000 + this.ahead - line.updated)))} ago`;
  }

  /** Returns the row of a run with its newest figures. It reuses links and checkboxes, so that no click is lost. */
  row(line) {
    if (!this.rows.has(line.id)) this.rows.set(line.id, this.newRow(line));
    const { element, mark, caption, figures } = this.rows.get(line.id);
    mark.checked = this.chosen.has(line.id);
    fill(caption, line.problem || (line.recipe ?? ""));
    const newest = [...figuresOf(line), this.ageOf(line)];
    figures.forEach((cell, place) => fill(cell, newest[place]));
    return element;
  }

  newRow(line) {
    const mark = el("input", {
      type: "checkbox",
      "aria-label": `compare ${line.name}`,
      onchange: () => this.choose(line.id, mark.checked),
    });
    const link = el("a", { href: `#/run/${line.id}` }, line.name);
    const caption = el("span", { class: "caption block" });
    const figures = FIGURES.map((label) => el("td", label === null ? {} : { "data-label": label }));
    const element = el(
      "tr",
      {},
      el("td", { class: "mark" }, mark),
      el("th", { scope: "row" }, link, caption),
      figures,
    );
    return { element, mark, caption, figures };
  }
}

function figuresOf(line) {
  const share = line.total_steps ? Math.min(1, line.step / line.total_steps) : 0;
  const steps = line.total_steps ? `${formatCount(line.step)} of ${formatCount(line.total_steps)}` : formatCount(line.step);
  const bar =
    line.state === "running" && share
      ? el("div", { class: "progress slim" }, el("div", { class: "done", style: { width: `${100 * share}%` } }))
      : null;
  return [
    statePill(line.state),
    [steps, bar],
    lossText(line),
    sparkline(line),
    line.goal_value === null ? el("span", { class: "none" }, "–") : `${line.goal} ${formatNumber(line.goal_value)}`,
  ];
}

/** Formats the newest loss, or that of each optimizer. */
function lossText({ loss, losses }) {
  const named = Object.entries(losses ?? {}).filter(([, value]) => value !== null);
  if (!named.length) return formatNumber(loss);
  return named.map(([name, value]) => `${name.replace(/^loss_/, "")} ${formatNumber(value)}`).join(", ");
}

/** Draws the training loss as a small area. Values far above the others, such as the first ones, are clipped. */
function sparkline({ sparkline: values = [] }) {
  const finite = values.filter((value) => Number.isFinite(value)).sort((a, b) => a - b);
  if (finite.length < 2) return el("span", { class: "none" }, "");
  const low = finite[0],
    high = finite[Math.ceil(0.95 * (finite.length - 1))];
  const places = values.flatMap((value, place) => {
    if (!Number.isFinite(value)) return [];
    const height = high > low ? Math.min(1, (value - low) / (high - low)) : 0.5;
    return [`${((100 * place) / (values.length - 1)).toFixed(1)}% ${(92 - 92 * height).toFixed(1)}%`];
  });
  const shape = `polygon(0% 100%, ${places.join(", ")}, 100% 100%)`;
  return el("i", { class: "spark", role: "img", "aria-label": "training loss", style: { "clip-path": shape } });
}

/** Returns a number that is larger for a better value of the goal. Runs without a value come after all others. */
function goalRank({ goal_value: value, goal_mode: mode }) {
  if (value === null) return -Infinity;
  return mode === "min" ? -value : value;
}

function compareKeys(a, b) {
  return a < b ? -1 : a > b ? 1 : 0;
}
