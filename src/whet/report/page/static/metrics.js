// Decides which curves share a chart, and whether lower or higher values are better.
import { trackOf } from "./curves.js";
import { displayName } from "./format.js";

const MOST_CURVES = 6;
const MOST_CHARTS = 8;
const VALIDATION_LOSS = /^(val_|valid_|validation_|eval_|dev_)?(loss|cross_entropy)$/;
const OWN_CHART = ["loss", "lr", "grad_norm", "samples_per_second"];

/** Returns the names of the training losses, one for each optimizer. */
export function lossesOf(report) {
  const names = Object.keys(report.losses);
  return names.length ? names : ["loss"];
}

/** Returns the name of the metric that is the loss on validation samples, or null. */
export function validationLoss(report) {
  return (trackOf(report, "eval")?.lines ?? []).find(({ name }) => VALIDATION_LOSS.test(name))?.name ?? null;
}

/** Returns "min" if lower values are better, "max" if higher values are better, or null if unknown. */
export function modeOf(report, line) {
  return line.name === report.goal ? report.goal_mode : line.mode;
}

/** Returns groups of related evaluation metrics. The group with the goal comes first. */
export function metricGroups(report) {
  const track = trackOf(report, "eval");
  const shared = validationLoss(report);
  const lines = (track?.lines ?? []).filter(({ name }) => !name.startsWith("test_") && name !== shared);
  lines.sort((a, b) => Number(b.name === report.goal) - Number(a.name === report.goal));
  return grouped(lines, report, (line, mode) => (isShare(line) && mode === "max" ? "scores" : familyOf(line.name)));
}

/** Returns groups of related numbers of the steps that have no chart of their own. */
export function scalarGroups(report) {
  const taken = new Set([...OWN_CHART, ...lossesOf(report)]);
  const lines = (trackOf(report, "step")?.lines ?? []).filter(({ name }) => !taken.has(name));
  return grouped(lines, report, (line) => familyOf(line.name));
}

function grouped(lines, report, keyOf) {
  const groups = new Map();
  for (const line of lines) {
    const mode = modeOf(report, line);
    const key = `${keyOf(line, mode)} ${mode}`;
    if (!groups.has(key)) groups.set(key, { names: [], mode });
    groups.get(key).names.push(line.name);
  }
  return [...groups.values()].slice(0, MOST_CHARTS).map(({ names, mode }) => {
    const shown = names.slice(0, MOST_CURVES);
    return { names: shown, mode, title: shown.map(displayName).join(", "), isGoal: shown.includes(report.goal) };
  });
}

/** Returns the group of a name. "train/acc" and "train/f1" are in one group, as are "halt_loss" and "value_loss". */
function familyOf(name) {
  return name.includes("/") ? name.split("/")[0] : name.split("_").at(-1);
}

function isShare(line) {
  return line.mean.every((value) => value === null || (value >= 0 && value <= 1));
}
