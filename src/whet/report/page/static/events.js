// The events of a run except steps and health readings, newest first, fetched page by page.
import { el, fill, section, table } from "./dom.js";
import { fetchJson } from "./server.js";
import { eventName, formatCount, formatDate, formatValue } from "./format.js";

/** Creates the section, which fetches events when the button is clicked. */
export function eventsPart(id) {
  const place = el("div", {});
  let before = null;
  const more = el(
    "button",
    {
      type: "button",
      class: "quiet",
      onclick: async () => {
        more.disabled = true;
        try {
          const { data: page } = await fetchJson(`/api/runs/${id}/events${before ? `?before=${encodeURIComponent(before)}` : ""}`);
          before = page.before;
          place.append(table(["when", "step", "kind", "fields"], page.events.map(rowOf), { class: "plain stacked" }));
          more.hidden = !before;
          fill(more, "older ones");
        } catch (failure) {
          place.append(el("p", { class: "notice bad" }, failure.message));
        }
        more.disabled = false;
      },
    },
    "show them",
  );
  return section(
    "events",
    "The log",
    "Every event except steps and health readings, newest first.",
    el("div", { class: "card" }, place, more),
  );
}

function rowOf(event) {
  const fields = Object.entries(event.fields ?? {})
    .map(([name, value]) => `${name}=${formatValue(value)}`)
    .join("  ")
    .slice(0, 1000);
  return [formatDate(event.time), formatCount(event.step), eventName(event.kind, event.fields?.state === "cool" ? "good" : "warn"), fields];
}
