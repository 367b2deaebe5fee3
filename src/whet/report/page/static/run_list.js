// The list of runs: filtered, sorted, and with marks to choose which to compare.
import { arrange, el, fill } from "./dom.js";
import { statePill } from "./head.js";
import { showCount, showNumber, showSeconds } from "./words.js";

const AT_ONCE = 200;
const MOST_COMPARED = 12;
// What a narrow screen writes before the cells from the state on.
const FIGURES = [null, "steps", "loss", "", "changed"];
const COLUMNS = [
  ["run", (line) => line.name.toLowerCase(), 1],
  ["state", (line) => line.state, 1],
  ["steps", (line) => line.step, -1],
  ["loss", (line) => line.loss ?? Infinity, 1],
  ["goal", (line) => line.goal_value ?? -Infinity, -1],
  ["changed", (line) => line.changed, -1],
];

export class RunList {
  constructor(folder) {
    this.lines = new Map();
    this.rows = new Map();
    this.chosen = new Set();
    this.sorted = ["changed", -1];
    this.shown = AT_ONCE;
    this.filter = el("input", {
      type: "search",
      placeholder: "filter by name, recipe or state",
      "aria-label": "filter",
      oninput: () => ((this.shown = AT_ONCE), this.draw()),
    });
    this.count = el("span", { class: "says", role: "status" });
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
      el("p", { class: "lead" }, folder ? `In ${folder}. Choose one to see it, or mark some to compare them.` : ""),
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

  /** All lines anew. */
  set({ runs, groups, now }) {
    // The clock of the server, which may be another machine, wrote the times.
    this.ahead = now - Date.now() / 1000;
    this.lines.clear();
    this.hear({ changed: runs, removed: [], groups });
  }

  /** Lines that changed; the folders with runs of their own where they are told. */
  hear({ changed, removed, groups }) {
    if (groups) fill(this.groups, groups.map((one) => this.group(one)));
    for (const line of changed) this.lines.set(line.id, line);
    for (const id of removed) this.lines.delete(id);
    for (const known of [this.rows, this.chosen])
      for (const id of known.keys()) if (!this.lines.has(id)) known.delete(id);
    this.draw();
  }

  /** Where more runs lie, such as those of a search, and how to see them. */
  group({ name, number }) {
    const path = `${this.folder}/${name}`;
    const quoted = /^[\w@%+=:,./-]+$/.test(path) ? path : `'${path.replaceAll("'", `'"'"'`)}'`;
    return el("p", { class: "says group" }, `${path} holds ${showCount(number)} more: `, el("code", {}, `whet watch ${quoted}`));
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
        ? `${showCount(found.length)} of ${showCount(this.lines.size)}`
        : "No runs yet. They appear here when a training begins.",
    );
    this.more.hidden = found.length <= this.shown;
    this.compare.hidden = this.chosen.size < 2;
    this.compare.textContent = `compare ${this.chosen.size} runs`;
    this.compare.href = `#/compare/${[...this.chosen].join(",")}`;
  }

  /** Time goes on where nothing else does. */
  tick() {
    for (const [id, { figures }] of this.rows) fill(figures.at(-1), this.ageOf(this.lines.get(id)));
  }

  ageOf(line) {
    return `${showSeconds(Math.max(0, Math.round(Date.now() / 1000 + this.ahead - line.changed)))} ago`;
  }

  /** The row of a run, with its newest figures. What can be pressed in it stays the same element. */
  row(line) {
    if (!this.rows.has(line.id)) this.rows.set(line.id, this.newRow(line));
    const { element, mark, says, figures } = this.rows.get(line.id);
    mark.checked = this.chosen.has(line.id);
    fill(says, line.problem || (line.recipe ?? ""));
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
    const says = el("span", { class: "says block" });
    const figures = FIGURES.map((label) => el("td", label === null ? {} : { "data-label": label }));
    const element = el(
      "tr",
      {},
      el("td", { class: "mark" }, mark),
      el("th", { scope: "row" }, link, says),
      figures,
    );
    return { element, mark, says, figures };
  }
}

function figuresOf(line) {
  const share = line.total_steps ? Math.min(1, line.step / line.total_steps) : 0;
  const steps = line.total_steps ? `${showCount(line.step)} of ${showCount(line.total_steps)}` : showCount(line.step);
  const bar =
    line.state === "running" && share
      ? el("div", { class: "progress slim" }, el("div", { class: "done", style: { width: `${100 * share}%` } }))
      : null;
  return [
    statePill(line.state),
    [steps, bar],
    showNumber(line.loss),
    line.goal_value === null ? el("span", { class: "none" }, "–") : `${line.goal} ${showNumber(line.goal_value)}`,
  ];
}

function compareKeys(a, b) {
  return a < b ? -1 : a > b ? 1 : 0;
}
