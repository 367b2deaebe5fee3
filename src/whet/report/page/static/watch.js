// The live page: a list of runs, one run, or several side by side, kept up to date while it is visible.
import { el, fill } from "./dom.js";
import { showComparison } from "./comparison.js";
import { eventsPart } from "./events.js";
import { RunList } from "./run_list.js";
import { showRun } from "./run.js";
import { EventStream, fetchJson } from "./server.js";
import { themeButton } from "./theme.js";

const LATER_MS = 5000;
const TICK_MS = 10000;
// HTTP status: no such run.
const GONE = 404;
const GONE_TEXT = "the run was removed; this is its last state";
const page = document.getElementById("page");
const status = el("span", { class: "status", role: "status" });
let shown = null;
let theme = "";

const redraw = (chosen) => {
  theme = chosen;
  if (shown?.settings) {
    shown.settings.theme = theme;
    shown.settings.redraw();
  }
};
fill(
  document.getElementById("bar"),
  el("a", { class: "brand", href: "#/" }, "whet"),
  status,
  el("span", { class: "grow" }),
  themeButton(redraw),
);

/** Show what the URL names. */
function go() {
  shown?.close();
  shown = null;
  scrollTo(0, 0);
  const [, kind, ids = ""] = location.hash.match(/^#\/(run|compare)\/([0-9a-f,]+)$/) ?? [];
  if (kind === "run") shown = new RunView([ids], `/api/runs/${ids}`, drawRun);
  else if (kind === "compare") shown = new RunView(ids.split(","), `/api/compare?ids=${ids}`, drawComparison);
  else shown = new List();
}

function showStatus(words) {
  fill(status, words);
}

function drawRun(report, [id]) {
  const inside = el("div", {});
  const made = showRun(inside, report);
  fill(page, inside, eventsPart(id), el("footer", {}, el("a", { href: "#/" }, "all runs")));
  document.title = `${report.name} - whet`;
  return made;
}

function drawComparison(comparison) {
  const inside = el("div", {});
  const made = showComparison(inside, comparison);
  fill(page, inside, el("footer", {}, el("a", { href: "#/" }, "all runs")));
  document.title = `${comparison.labels.join(" / ")} - whet`;
  return made;
}

/** Data that is fetched again whenever the server announces a change. */
class LiveData {
  constructor(ids, path) {
    this.path = path;
    this.isClosed = this.isFetching = this.isStale = false;
    this.listening = new EventStream(ids, {
      hello: () => this.begin(),
      run: () => this.fetch(),
      runs: (news) => this.hear(news),
      lost: showStatus,
    });
  }

  /** After a lost connection, the pending request may never be answered. */
  begin() {
    this.pending?.abort();
    this.fetch();
  }

  /** One request at a time; changes during it are fetched afterwards. */
  async fetch() {
    this.isStale = true;
    if (this.isFetching) return;
    this.isFetching = true;
    clearTimeout(this.timer);
    while (this.isStale && !this.isClosed) {
      this.isStale = false;
      this.pending = new AbortController();
      try {
        const newest = await fetchJson(this.path, this.pending.signal);
        if (this.isClosed) break;
        this.show(newest);
        showStatus("live");
      } catch (failure) {
        if (!this.isClosed && failure.name !== "AbortError") this.explain(failure);
      }
    }
    this.isFetching = false;
  }

  /** Show why there is nothing to show, and retry: the cause may go away without an event. */
  explain({ message, status }) {
    if (!this.isDrawn)
      fill(
        page,
        el("p", { class: "notice bad" }, message),
        el("p", {}, el("a", { href: "#/" }, "all runs")),
      );
    const isGone = status === GONE && this.isDrawn;
    showStatus(isGone ? GONE_TEXT : status ? "could not be read" : "not connected; trying again");
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.fetch(), LATER_MS);
  }

  close() {
    this.isClosed = true;
    clearTimeout(this.timer);
    this.listening.close();
  }
}

/** One run, or several. */
class RunView extends LiveData {
  constructor(ids, path, draw) {
    super(ids, path);
    this.ids = ids;
    this.draw = draw;
    this.drawn = null;
    fill(page, el("p", { class: "lead wait" }, "reading the run ..."));
  }

  get settings() {
    return this.drawn?.settings;
  }

  get isDrawn() {
    return this.drawn !== null;
  }

  hear({ removed }) {
    if (this.ids.some((id) => removed.includes(id))) showStatus(GONE_TEXT);
  }

  show(newest) {
    if (this.drawn) this.drawn.update(newest);
    else {
      this.drawn = this.draw(newest, this.ids);
      this.drawn.settings.theme = theme;
    }
  }

  close() {
    super.close();
    this.drawn?.close();
  }
}

/** The list of all runs. */
class List extends LiveData {
  constructor() {
    super([], "/api/runs");
    this.list = null;
    this.missed = [];
    this.ticking = setInterval(() => this.list?.tick(), TICK_MS);
    document.title = "runs - whet";
    fill(page, el("p", { class: "lead wait" }, "looking for runs ..."));
  }

  get isDrawn() {
    return this.list !== null;
  }

  /** A response that is still loading may be older than this update. */
  hear(news) {
    if (this.isFetching) this.missed.push(news);
    this.list?.hear(news);
  }

  show(answer) {
    if (!this.list) {
      this.list = new RunList(answer.folder);
      fill(page, this.list.element);
    }
    this.list.set(answer);
    for (const news of this.missed.splice(0)) this.list.hear(news);
  }

  close() {
    super.close();
    clearInterval(this.ticking);
  }
}

// Last: classes do not exist before their definition.
addEventListener("hashchange", go);
go();
