// How to reproduce the run: command, configuration, data, versions and machine.
import { disclosure, el, section, table } from "./dom.js";
import { formatCount, formatDate, formatValue } from "./format.js";

export function provenancePart(report) {
  const origin = report.provenance;
  const facts = [
    ["machine", report.machine || "unknown"],
    ["created", `${formatDate(report.created)} by whet ${report.whet}`],
    ["seed", origin.seed === null ? "not recorded" : String(origin.seed)],
    [
      "data",
      origin.data ? el("code", {}, origin.data.slice(0, 16)) : "no fingerprint",
      origin.num_samples ? ` ${formatCount(origin.num_samples)} samples` : "",
    ],
    [
      "exact",
      report.inexact_since === null
        ? (report.exactness ?? "never resumed")
        : `until step ${formatCount(report.inexact_since)}`,
    ],
    ...(report.proof ? [["proof", report.proof]] : []),
  ];
  return section(
    "provenance",
    "How to reproduce it",
    "The same command, configuration, data and versions give the same result.",
    el(
      "div",
      { class: "card" },
      commandOf(
        origin.command ?? "Started from Python: run the same code with the same settings.",
        Boolean(origin.command),
      ),
      report.resume ? [el("p", { class: "caption" }, "To resume this run:"), commandOf(report.resume, true)] : null,
      el(
        "dl",
        { class: "facts" },
        facts.map(([name, ...words]) => [el("dt", {}, name), el("dd", {}, ...words)]),
      ),
    ),
    el(
      "div",
      { class: "card more" },
      disclosure("configuration", () => pairs(flat(origin.config))),
      disclosure("versions", () => pairs(Object.entries(origin.versions))),
      disclosure("machine, as probed", () => pairs(flat(origin.machine))),
    ),
  );
}

function commandOf(words, canCopy) {
  const code = el("code", {}, words);
  if (!canCopy || !navigator.clipboard) return el("pre", { class: "command" }, code);
  const copy = el(
    "button",
    {
      type: "button",
      class: "quiet",
      onclick: async () => {
        try {
          await navigator.clipboard.writeText(words);
          copy.textContent = "copied";
        } catch {
          getSelection().selectAllChildren(code);
        }
      },
    },
    "copy",
  );
  return el("pre", { class: "command" }, code, copy);
}

function pairs(entries) {
  return table(
    ["name", "value"],
    entries.map(([name, value]) => [el("code", {}, name), formatValue(value)]),
    { class: "plain" },
  );
}

function flat(object, above = "") {
  return Object.entries(object).flatMap(([name, value]) =>
    value !== null && typeof value === "object" && !Array.isArray(value)
      ? flat(value, `${above}${name}.`)
      : [[above + name, value]],
  );
}
