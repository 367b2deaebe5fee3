// Requests to the server.
import { restoreNonFinite } from "./json.js";

/** GET a JSON resource and its ETag; throws an Error with the text and status of any answer but 200. */
export async function fetchJson(path, signal) {
  const answer = await fetch(path, { credentials: "same-origin", cache: "no-cache", signal });
  if (answer.status !== 200) {
    const refusal = new Error((await answer.text()).slice(0, 500) || `the server answered ${answer.status}`);
    throw Object.assign(refusal, { status: answer.status });
  }
  return { data: restoreNonFinite(await answer.json()), tag: answer.headers.get("ETag") };
}
