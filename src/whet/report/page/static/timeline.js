// What happened during the run, and suggestions for the next one.
import { disclosure, el, pill, section, table } from "./dom.js";
import { eventName, formatCount, formatSeconds } from "./format.js";

const FIRST = 12;

export function timelinePart(report) {
  const entries = report.timeline;
  if (!entries.length) return null;
  const notable = entries.filter((entry) => entry.kind !== "checkpoint" || entry.step === 0);
  const saves = entries.length - notable.length;
  const end = Math.max(
    1e-9,
    report.training_seconds,
    ...entries.map((entry) => entry.seconds),
    ...report.sessions.map((session) => session.begins_at),
  );
  const line = el(
    "div",
    { class: "timeline", "aria-hidden": "true" },
    report.slow_periods.map((period) =>
      el("i", {
        class: `period ${period.cause}`,
        title: period.reason,
        style: {
          left: `${(100 * period.from_seconds) / end}%`,
          width: `${Math.max(0.4, (100 * (period.to_seconds - period.from_seconds)) / end)}%`,
        },
      }),
    ),
    report.sessions
      .slice(1)
      .map((session) => el("i", { class: "seam", style: { left: `${(100 * session.begins_at) / end}%` } })),
    entries.map((entry) =>
      el("i", {
        class: `entry ${entry.tone} ${entry.kind === "checkpoint" ? "small" : ""}`,
        title: `${eventName(entry.kind, entry.tone)}: ${entry.text}`,
        style: { left: `${(100 * entry.seconds) / end}%` },
      }),
    ),
  );
  const left = report.timeline_omitted
    ? el("p", { class: "caption" }, `${formatCount(report.timeline_omitted)} more in the middle are not shown.`)
    : null;
  return section(
    "timeline",
    "What happened",
    "From the start of training to its end. Orange and red need attention; small dots are checkpoints.",
    el(
      "div",
      { class: "card" },
      line,
      el("div", { class: "timeline-ends" }, el("span", {}, "start"), el("span", {}, formatSeconds(end))),
      entryTable(notable.slice(0, FIRST)),
      notable.length > FIRST
        ? disclosure(`${notable.length - FIRST} more`, () => entryTable(notable.slice(FIRST)))
        : null,
      saves
        ? disclosure(`${saves} checkpoints`, () =>
            entryTable(entries.filter((entry) => entry.kind === "checkpoint" && entry.step)),
          )
        : null,
      left,
    ),
  );
}

function entryTable(entries) {
  return table(
    ["when", "step", "event", "details"],
    entries.map((entry) => [
      formatSeconds(entry.seconds),
      formatCount(entry.step),
      pill(eventName(entry.kind, entry.tone), entry.tone),
      entry.text,
    ]),
    { class: "plain stacked entries" },
  );
}

export function advicePart(report) {
  if (!report.advice.length) return null;
  return section(
    "advice",
    "What to try next",
    "Each suggestion is backed by a measurement of this run or of its plan.",
    el(
      "ul",
      { class: "advice" },
      report.advice.map((one) => el("li", {}, el("b", {}, one.try_), el("span", {}, `Measured: ${one.measured}.`))),
    ),
  );
}
