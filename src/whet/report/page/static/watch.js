// The live page: a list of runs, one run, or several runs side by side, updated while the page is visible.
import { el, fill } from "./dom.js";
import { showComparison } from "./comparison.js";
import { eventsPart } from "./events.js";
import { RunList } from "./run_list.js";
import { showRun } from "./run.js";
import { fetchJson } from "./server.js";
import { themeButton } from "./theme.js";

const POLL_MS = 1000;
const LATER_MS = 5000;
const SILENT_MS = 45000;
const TICK_MS = 10000;
// HTTP statuses for a key that is no longer valid, and for a run that does not exist.
const REFUSED = 401;
const GONE = 404;
const RESTARTED_TEXT = "not connected: the server was restarted; open the link that it printed";
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

/** Shows the run, the comparison or the list that the URL names. */
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

/** Base class for views whose data is fetched again every second while the page is visible. */
class LiveData {
  constructor(path) {
    this.path = path;
    this.isClosed = this.isFetching = false;
    this.seen = () => this.fetch();
    document.addEventListener("visibilitychange", this.seen);
  }

  /** Fetches the data, one request at a time. A request is aborted after a while, because a connection through a tunnel
   * or after a sleep may be dead without an error. */
  async fetch() {
    clearTimeout(this.timer);
    if (this.isClosed || this.isFetching || document.visibilityState === "hidden") return;
    this.isFetching = true;
    this.pending = new AbortController();
    const silence = setTimeout(() => this.pending.abort(), SILENT_MS);
    let pause = POLL_MS;
    try {
      const { data, tag } = await fetchJson(this.path, this.pending.signal);
      if (!this.isClosed) {
        if (!tag || tag !== this.tag) this.show(data);
        this.tag = tag;
        showStatus("live");
      }
    } catch (failure) {
      if (!this.isClosed) this.explain(failure);
      pause = LATER_MS;
    }
    clearTimeout(silence);
    this.isFetching = false;
    if (!this.isClosed) this.timer = setTimeout(() => this.fetch(), pause);
  }

  /** Shows why a request failed. The next request may succeed. */
  explain({ message, status }) {
    if (!this.isDrawn)
      fill(
        page,
        el("p", { class: "notice bad" }, message),
        el("p", {}, el("a", { href: "#/" }, "all runs")),
      );
    // Show the run again when it is back, even if it is unchanged.
    this.tag = null;
    if (!status) showStatus("not connected; trying again");
    else if (status === REFUSED) showStatus(RESTARTED_TEXT);
    else showStatus(status === GONE && this.isDrawn ? GONE_TEXT : "could not be read");
  }

  close() {
    this.isClosed = true;
    clearTimeout(this.timer);
    this.pending?.abort();
    document.removeEventListener("visibilitychange", this.seen);
  }
}

/** The view of one run, or of several runs side by side. */
class RunView extends LiveData {
  constructor(ids, path, draw) {
    super(path);
    this.ids = ids;
    this.draw = draw;
    this.drawn = null;
    fill(page, el("p", { class: "lead wait" }, "reading the run ..."));
    this.fetch();
  }

  get settings() {
    return this.drawn?.settings;
  }

  get isDrawn() {
    return this.drawn !== null;
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

/** The view of the list of all runs. */
class List extends LiveData {
  constructor() {
    super("/api/runs");
    this.list = null;
    this.ticking = setInterval(() => this.list?.tick(), TICK_MS);
    document.title = "runs - whet";
    fill(page, el("p", { class: "lead wait" }, "looking for runs ..."));
    this.fetch();
  }

  get isDrawn() {
    return this.list !== null;
  }

  show(answer) {
    if (!this.list) {
      this.list = new RunList(answer.folder);
      fill(page, this.list.element);
    }
    this.list.update(answer);
    this.path = `/api/runs?since=${answer.version}`;
  }

  close() {
    super.close();
    clearInterval(this.ticking);
  }
}

// This must come last, because classes cannot be used before their definition.
addEventListener("hashchange", go);
go();
