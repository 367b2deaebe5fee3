// Requests to the server.
import { restoreNonFinite } from "./json.js";

/** Fetches a JSON resource and its ETag. Throws an Error with text and status for any response other than 200. */
export async function fetchJson(path, signal) {
  const answer = await fetch(path, { credentials: "same-origin", cache: "no-cache", signal });
  if (answer.status !== 200) {
    const refusal = new Error((await answer.text()).slice(0, 500) || `the server answered ${answer.status}`);
    throw Object.assign(refusal, { status: answer.status });
  }
  return { data: restoreNonFinite(await answer.json()), tag: answer.headers.get("ETag") };
}
