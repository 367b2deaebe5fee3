// Requests to the server, and its stream of changes.
import { restoreNonFinite } from "./json.js";

const AGAIN_MS = 5000;
// The server sends a heartbeat every 15 seconds.
const SILENT_MS = 45000;
// A browser opens six connections to one server: hidden pages must leave some to the others.
const UNSEEN_MS = 5000;
const RESTARTED = "not connected: the server was restarted; open the link that it printed";

/** GET a JSON resource; throws an Error with the text and status of any answer but 200. */
export async function fetchJson(path, signal) {
  const answer = await fetch(path, { credentials: "same-origin", cache: "no-cache", signal });
  if (answer.status !== 200) throw await errorOf(answer);
  return restoreNonFinite(await answer.json());
}

async function errorOf(answer) {
  const refusal = new Error((await answer.text()).slice(0, 500) || `the server answered ${answer.status}`);
  return Object.assign(refusal, { status: answer.status });
}

/** Receives events until it is closed; `on` has a handler for each kind: hello, runs, run, lost. */
export class EventStream {
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
      // The browser reconnects by itself unless the server refused.
      if (this.source.readyState === EventSource.CLOSED) this.refused();
    };
    this.wait();
  }

  /** Reconnect after a silence: a connection may be dead without an error, behind a tunnel or after a sleep. */
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
    const pending = new AbortController();
    const answer = await fetch(this.address, { credentials: "same-origin", signal: pending.signal }).catch(() => null);
    const status = answer?.status;
    const refusal = answer && status !== 200 ? await errorOf(answer).catch(() => null) : null;
    pending.abort();
    if (refusal && !this.isClosed) this.on.lost(status === 401 ? RESTARTED : refusal.message.split("\n")[0]);
  }

  /** Disconnect while the page is hidden; on return everything is fetched again. */
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
