// The plan: its settings, the measurements behind them, and planned versus actual figures.
import { disclosure, el, pill, section, table } from "./dom.js";
import { formatBytes, formatNumber, formatSeconds, formatValue } from "./format.js";
import { plannedRows } from "./summary.js";

const SOURCES = { measured: "good", you: "live", environment: "live", rule: "plain" };
const TICKS = [1, 2, 0.5, 4, 0.25, 8, 0.125, 16, 32, 0.0625, 1.5, 0.75, 1.25, 0.8, 1.1, 0.9];
const VERDICTS = {
  faster: "good",
  "no gain": "plain",
  "not worth it": "plain",
  "not checked": "warn",
  unclear: "warn",
  "cut off": "bad",
  disagrees: "bad",
  failed: "bad",
  "not tried": "plain",
};

export function planPart(report) {
  const { settings } = report;
  const shown = settings.filter((one) => (one.value !== null && one.value !== "unused") || one.source === "you");
  if (!shown.length) return null;
  const order = { you: 0, environment: 1, measured: 2, rule: 3 };
  // Array.sort is stable, so settings with the same source keep their order.
  shown.sort((a, b) => (order[a.source] ?? 4) - (order[b.source] ?? 4));
  const byRule = shown.filter((one) => one.source === "rule"),
    others = shown.filter((one) => one.source !== "rule");
  return section(
    "plan",
    "The plan",
    "How this run was executed on this machine, and why. Every setting can be overridden.",
    report.warnings.map((text) => el("p", { class: "notice warn" }, text)),
    el(
      "div",
      { class: "card" },
      others.length ? settingsTable(others) : null,
      byRule.length ? disclosure(`${byRule.length} settings by rules`, () => settingsTable(byRule)) : null,
    ),
  );
}

function settingsTable(settings) {
  const rows = settings.map((one) => [
    el("code", {}, one.name),
    el("b", {}, formatValue(one.value)),
    one.reason,
    pill(one.source === "rule" && one.evidence?.rule ? `rule ${one.evidence.rule}` : one.source, SOURCES[one.source]),
  ]);
  return table(["setting", "value", "why", "from"], rows, { class: "plain stacked plan-settings" });
}

export function evidencePart(report) {
  if (!report.evidence.length) return null;
  const scale = scaleOf(report.evidence);
  return section(
    "evidence",
    "What was measured",
    "Real steps of this model, timed in alternation with the best so far. A dot to the right of 1x is faster; the bar is its confidence interval.",
    el(
      "div",
      { class: "card evidence" },
      rulerOf(scale),
      report.evidence.map((group) => [
        el(
          "h3",
          {},
          group.setting === "plan" ? "the whole plan" : group.setting,
          group.value ? el("span", { class: "used" }, "used: ", el("b", {}, group.value)) : null,
        ),
        group.trials.map((one) => trialOf(one, scale)),
      ]),
    ),
  );
}

/** Returns a logarithmic scale for all candidates, on which equal distances are equal ratios. */
function scaleOf(evidence) {
  const values = evidence
    .flatMap((group) => group.trials.flatMap((one) => [one.speedup, ...(one.interval ?? [])]))
    .filter((value) => value > 0);
  const least = Math.max(1 / 64, Math.min(0.8, ...values)),
    most = Math.min(64, Math.max(1.25, ...values));
  const [from, to] = [Math.log(least) - 0.06, Math.log(most) + 0.06];
  return { at: (value) => 100 * Math.min(1, Math.max(0, (Math.log(value) - from) / (to - from))), least, most };
}

function rulerOf(scale) {
  const taken = [];
  const ticks = TICKS.filter((value) => {
    const at = scale.at(value);
    const fits =
      value >= scale.least * 0.99 && value <= scale.most * 1.01 && taken.every((other) => Math.abs(other - at) > 11);
    if (fits) taken.push(at);
    return fits;
  });
  return el(
    "div",
    { class: "candidate ruler", "aria-hidden": "true" },
    el("span", {}),
    el(
      "div",
      { class: "track" },
      ticks.map((value) =>
        el("span", { class: "tick", style: { left: `${scale.at(value)}%` } }, `${formatNumber(value)}x`),
      ),
    ),
    el("span", {}),
  );
}

function trialOf(one, scale) {
  const tone = VERDICTS[one.verdict] ?? "plain";
  const track = el("div", { class: "track" }, el("i", { class: "one", style: { left: `${scale.at(1)}%` } }));
  const [low, high] = one.interval ?? [null, null];
  if (low && high)
    track.append(
      el("i", {
        class: `interval ${tone}`,
        style: { left: `${scale.at(low)}%`, width: `${Math.max(0.5, scale.at(high) - scale.at(low))}%` },
      }),
    );
  if (one.speedup) track.append(el("i", { class: `centre ${tone}`, style: { left: `${scale.at(one.speedup)}%` } }));
  const figures = [
    one.speedup
      ? `${one.speedup.toFixed(2)}x${low ? ` (${low.toFixed(2)} to ${high.toFixed(2)})` : ""}`
      : null,
    one.median_seconds ? `${formatSeconds(one.median_seconds)} a step` : null,
    one.peak_bytes ? formatBytes(one.peak_bytes) : null,
    one.repeats ? `${one.repeats} repeats` : null,
  ]
    .filter(Boolean)
    .join(" · ");
  return el(
    "div",
    { class: one.chosen ? "candidate chosen" : "candidate" },
    el("div", { class: "who" }, el("code", {}, one.label), el("span", { class: "rival" }, `against ${one.baseline}`)),
    track,
    el(
      "div",
      { class: "outcome" },
      pill(one.verdict, tone),
      el("span", { class: "figures" }, figures),
      el("span", { class: "words" }, one.note),
    ),
  );
}

export function plannedPart(report) {
  const rows = plannedRows(report).filter((row) => row.planned !== "–");
  if (!rows.some((row) => row.is_comparable && row.unit !== "steps")) return null;
  return section(
    "planned",
    "Planned vs. actual",
    "Figures planned before the first step, and the actual ones.",
    el(
      "div",
      { class: "card" },
      table(
        ["figure", "planned", "actual", "actual / planned", "counted how"],
        rows.map((row) => [
          row.name,
          row.planned,
          row.actual,
          row.ratio === null ? "–" : `${row.ratio.toFixed(2)}x`,
          row.note,
        ]),
        { class: "plain stacked planned" },
      ),
    ),
  );
}
