// The live page: a list of runs, one run, or several side by side, each kept up to date while it is looked at.
import { el, fill } from "./dom.js";
import { showComparison } from "./comparison.js";
import { eventsPart } from "./events.js";
import { RunList } from "./run_list.js";
import { showRun } from "./run.js";
import { Listening, ask } from "./server.js";
import { themeButton } from "./theme.js";

const AGAIN_MS = 1000;
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

/** Shows what the address says. */
function go() {
  shown?.close();
  shown = null;
  scrollTo(0, 0);
  const [, kind, ids = ""] = location.hash.match(/^#\/(run|compare)\/([0-9a-f,]+)$/) ?? [];
  if (kind === "run") shown = new Shown([ids], () => ask(`/api/runs/${ids}`), drawRun);
  else if (kind === "compare") shown = new Shown(ids.split(","), () => ask(`/api/compare?ids=${ids}`), drawComparison);
  else shown = new List();
}

function say(words) {
  fill(status, words);
}

function drawRun(view, [id]) {
  const inside = el("div", {});
  const made = showRun(inside, view);
  fill(page, inside, eventsPart(id), el("footer", {}, el("a", { href: "#/" }, "all runs")));
  document.title = `${view.name} - whet`;
  return made;
}

function drawComparison(comparison) {
  const inside = el("div", {});
  const made = showComparison(inside, comparison);
  fill(page, inside, el("footer", {}, el("a", { href: "#/" }, "all runs")));
  document.title = `${comparison.labels.join(" / ")} - whet`;
  return made;
}

/** One run, or several, fetched again whenever the server says that there is something new. */
class Shown {
  constructor(ids, fetchNewest, draw) {
    this.ids = ids;
    this.fetchNewest = fetchNewest;
    this.draw = draw;
    this.drawn = null;
    this.isClosed = this.isFetching = this.isStale = false;
    fill(page, el("p", { class: "lead wait" }, "reading the run ..."));
    const fetchIt = () => this.fetch();
    this.listening = new Listening(ids, {
      hello: fetchIt,
      run: fetchIt,
      runs: ({ removed }) => {
        if (ids.some((id) => removed.includes(id))) say("the run is gone; this was read before");
      },
      lost: () => say("not connected; trying again"),
    });
  }

  get settings() {
    return this.drawn?.settings;
  }

  /** One request at a time; what changed meanwhile is fetched after it. */
  async fetch() {
    this.isStale = true;
    if (this.isFetching) return;
    this.isFetching = true;
    while (this.isStale && !this.isClosed) {
      this.isStale = false;
      try {
        this.show(await this.fetchNewest());
      } catch (failure) {
        if (!this.isClosed) this.explain(failure);
      }
    }
    this.isFetching = false;
  }

  /** Says why there is nothing to show; what the server is still reading is asked for again. */
  explain({ message, isEarly }) {
    if (!this.drawn)
      fill(
        page,
        el("p", { class: isEarly ? "lead wait" : "notice bad" }, message),
        el("p", {}, el("a", { href: "#/" }, "all runs")),
      );
    say(isEarly ? "reading the run" : "the run could not be read");
    if (isEarly) setTimeout(() => this.fetch(), AGAIN_MS);
  }

  show(newest) {
    if (this.isClosed) return;
    say("live");
    if (this.drawn) this.drawn.update(newest);
    else {
      this.drawn = this.draw(newest, this.ids);
      this.drawn.settings.theme = theme;
    }
  }

  close() {
    this.isClosed = true;
    this.listening.close();
    this.drawn?.close();
  }
}

/** The list of all runs. */
class List {
  constructor() {
    this.list = null;
    this.isClosed = false;
    document.title = "runs - whet";
    fill(page, el("p", { class: "lead wait" }, "looking for runs ..."));
    this.listening = new Listening([], {
      hello: () => this.fetch(),
      runs: ({ changed, removed, groups }) => this.list?.set(changed, removed, false, groups),
      run: () => {},
      lost: () => say("not connected; trying again"),
    });
  }

  async fetch() {
    try {
      const { runs, folder, groups } = await ask("/api/runs");
      if (this.isClosed) return;
      if (!this.list) {
        this.list = new RunList(folder);
        fill(page, this.list.element);
      }
      this.list.set(runs, [], true, groups);
      say("live");
    } catch (failure) {
      if (!this.isClosed) fill(page, el("p", { class: "notice bad" }, failure.message));
    }
  }

  close() {
    this.isClosed = true;
    this.listening.close();
  }
}

// Last: classes are not there before their line.
addEventListener("hashchange", go);
go();
