// How does the live page talk to its server? It asks for JSON, and listens for what changed.
import { restored } from "./strict.js";

/** The answer of the server to a GET; an Error with its own words where it refuses, or has not finished reading. */
export async function ask(path) {
  const answer = await fetch(path, { credentials: "same-origin", cache: "no-cache" });
  if (answer.status !== 200) {
    const failure = new Error((await answer.text()).slice(0, 500) || `the server answered ${answer.status}`);
    failure.isEarly = answer.status === 202;
    throw failure;
  }
  return restored(await answer.json());
}

/** Listens until it is closed; `on` has a handler for each kind of news: hello, runs, run, lost. */
export class Listening {
  constructor(runs, on) {
    this.address = `/api/stream${runs.length ? `?run=${runs.join(",")}` : ""}`;
    this.on = on;
    this.open();
  }

  open() {
    this.source = new EventSource(this.address);
    for (const kind of ["hello", "runs", "run"])
      this.source.addEventListener(kind, (event) => this.on[kind](JSON.parse(event.data)));
    this.source.onerror = () => {
      this.on.lost();
      // A browser tries again by itself unless the server said no.
      if (this.source.readyState === EventSource.CLOSED) this.timer = setTimeout(() => this.open(), 5000);
    };
  }

  close() {
    clearTimeout(this.timer);
    this.source.close();
  }
}
