// How does the live page talk to its server? It asks for JSON, and listens for what changed.
import { restored } from "./strict.js";

const AGAIN_MS = 5000;
// The server says something every 15 seconds.
const SILENT_MS = 45000;
// A browser has six connections to one server: pages that nobody looks at must leave some to the others.
const UNSEEN_MS = 5000;
const RESTARTED = "not connected: the server was started anew; open the link that it printed";

/** The answer of the server to a GET; an Error with its words and status where it refuses, or has not finished reading. */
export async function ask(path, signal) {
  const answer = await fetch(path, { credentials: "same-origin", cache: "no-cache", signal });
  if (answer.status !== 200) throw await refusalOf(answer);
  return restored(await answer.json());
}

async function refusalOf(answer) {
  const refusal = new Error((await answer.text()).slice(0, 500) || `the server answered ${answer.status}`);
  return Object.assign(refusal, { status: answer.status });
}

/** Listens until it is closed; `on` has a handler for each kind of news: hello, runs, run, lost. */
export class Listening {
  constructor(runs, on) {
    this.address = `/api/stream${runs.length ? `?run=${runs.join(",")}` : ""}`;
    this.on = on;
    this.seen = () => this.look();
    document.addEventListener("visibilitychange", this.seen);
    this.open();
    this.look();
  }

  open() {
    this.leave();
    this.source = new EventSource(this.address);
    for (const kind of ["hello", "runs", "run", "still"])
      this.source.addEventListener(kind, (event) => {
        this.wait();
        this.on[kind]?.(JSON.parse(event.data));
      });
    this.source.onerror = () => {
      this.on.lost("not connected; trying again");
      // A browser tries again by itself unless the server said no.
      if (this.source.readyState === EventSource.CLOSED) this.refused();
    };
    this.wait();
  }

  /** A connection may be dead though nobody says so: behind a tunnel, after a sleep, with a server that is held still. */
  wait() {
    clearTimeout(this.timer);
    this.timer = setTimeout(() => {
      this.on.lost("not connected; trying again");
      this.open();
    }, SILENT_MS);
  }

  async refused() {
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.open(), AGAIN_MS);
    const asking = new AbortController();
    const answer = await fetch(this.address, { credentials: "same-origin", signal: asking.signal }).catch(() => null);
    const status = answer?.status;
    const refusal = answer && status !== 200 ? await refusalOf(answer).catch(() => null) : null;
    asking.abort();
    if (refusal && !this.isClosed) this.on.lost(status === 401 ? RESTARTED : refusal.message.split("\n")[0]);
  }

  /** Hears nothing while the page is hidden, and is told everything when it is seen again. */
  look() {
    clearTimeout(this.hiding);
    if (document.visibilityState === "hidden") this.hiding = setTimeout(() => this.leave(), UNSEEN_MS);
    else if (!this.source) this.open();
  }

  leave() {
    clearTimeout(this.timer);
    this.source?.close();
    this.source = null;
  }

  close() {
    this.isClosed = true;
    document.removeEventListener("visibilitychange", this.seen);
    clearTimeout(this.hiding);
    this.leave();
  }
}
