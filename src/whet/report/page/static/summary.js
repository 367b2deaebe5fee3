// The summary at the top of a run: name, state, progress and key figures.
import { el, pill } from "./dom.js";
import { displayName, formatBytes, formatCount, formatDate, formatNumber, formatPercent, formatSeconds, formatUnit } from "./format.js";
import { lineOf, trackOf } from "./curves.js";

const STATES = { done: "good", running: "live", stopped: "warn", failed: "bad" };

export function statePill(state) {
  return pill(state, STATES[state] ?? "plain");
}

/** Creates the summary: name, state, a line about recipe and machine, progress, notices and key figures. */
export function runSummary(report) {
  return el(
    "header",
    { class: "hero" },
    el("div", { class: "title" }, el("h1", {}, report.name), statePill(report.state)),
    endOf(report),
    el("p", { class: "lead" }, leadOf(report)),
    progressOf(report),
    inexactOf(report),
    report.damaged_lines
      ? el("p", { class: "notice warn" }, `${formatCount(report.damaged_lines)} damaged lines of the log were skipped.`)
      : null,
    el("div", { class: "tiles" }, tilesOf(report).map(tile)),
  );
}

function leadOf(report) {
  const parts = [`${report.recipe} on ${report.machine || "an unknown machine"}`];
  if (report.sessions.length) parts.push(`started ${formatDate(report.created)}`);
  if (report.sessions.length > 1) parts.push(`${report.sessions.length} sessions`);
  if (report.state === "running" && report.sessions.length) parts.push(`as of ${formatDate(report.sessions.at(-1).ended)}`);
  return `${parts.join(" · ")}.`;
}

/** Creates the reason why the run ended, with the traceback if it failed. */
function endOf(report) {
  if (!report.reason) return null;
  const tone = report.state === "failed" ? "notice bad" : "says";
  const trace = report.traceback ? el("pre", { class: "traceback" }, report.traceback) : null;
  return el("div", { class: tone }, el("b", {}, "Ended: "), report.reason, trace);
}

function progressOf(report) {
  if (!report.total_steps || report.state === "done") return null;
  const share = Math.min(1, report.step / report.total_steps);
  return el(
    "div",
    {
      class: "progress",
      role: "progressbar",
      "aria-valuenow": Math.round(100 * share),
      "aria-valuemin": 0,
      "aria-valuemax": 100,
      "aria-label": `step ${report.step} of ${report.total_steps}`,
    },
    el("div", { class: "done", style: { width: `${100 * share}%` } }),
  );
}

function inexactOf(report) {
  if (report.inexact_since === null) return null;
  return el(
    "p",
    { class: "notice warn" },
    `Not bit-exact since step ${formatCount(report.inexact_since)}: ${report.inexact_reason}`,
  );
}

/** Returns the key figures of a run, each with a name, a figure and a remark. */
export function tilesOf(report) {
  const tiles = [];
  const { loss, losses, goal, goal_value: value } = report;
  for (const [name, newest] of Object.entries(losses))
    tiles.push({ name: displayName(name), figure: formatNumber(newest), remark: "of its optimizer" });
  if (loss !== null && !Object.keys(losses).length) {
    tiles.push({
      name: "training loss",
      figure: formatNumber(loss),
      remark: report.first_loss === null ? "" : `${formatNumber(report.first_loss)} at the start`,
    });
  }
  if (goal !== null && value !== null) {
    const best =
      report.best_goal === value
        ? "its best so far"
        : `best ${formatNumber(report.best_goal)} at step ${formatCount(report.best_goal_step ?? 0)}`;
    const name = goal.replaceAll("_", " ");
    tiles.push({ name, figure: formatNumber(value), remark: best, isGoal: true });
    const test = report.metrics[`test_${goal.replace(/^val_/, "")}`];
    if (test !== undefined) {
      const baseline = Object.entries(report.baseline).map(([name, value]) => `${name}: ${formatNumber(value)}`)[0];
      tiles.push({ name: `test ${name}`, figure: formatNumber(test), remark: baseline ?? "on the test split" });
    }
  }
  const of = report.total_steps ? `of ${formatCount(report.total_steps)}` : "";
  tiles.push({
    name: "steps",
    figure: formatCount(report.step),
    remark: [of, report.samples ? `${formatCount(report.samples)} samples` : ""].filter(Boolean).join("\n"),
  });
  const speed = report.planned_vs_actual.find((one) => one.name === "speed")?.actual;
  if (speed)
    tiles.push({ name: "speed", figure: formatNumber(Number(speed.toPrecision(3))), remark: "samples per second" });
  if (report.training_seconds) {
    const inModel = report.phases
      .filter((phase) => ["forward", "backward", "optimizer"].includes(phase.name))
      .reduce((sum, phase) => sum + phase.share, 0);
    tiles.push({
      name: "training time",
      figure: formatSeconds(report.training_seconds),
      remark: timeRemark(report.seconds_left, inModel),
    });
  }
  const memory = peakMemory(report);
  if (memory) tiles.push(memory);
  return tiles;
}

function timeRemark(left, inModel) {
  const share = inModel ? `${formatPercent(inModel)} in the model` : "";
  return [left ? `${formatSeconds(left)} left` : "", share].filter(Boolean).join("\n");
}

function peakMemory(report) {
  for (const [source, name] of [
    ["health", "memory/peak"],
    ["health", "memory/allocated"],
    ["epoch", "memory/peak"],
    ["epoch", "memory/allocated"],
  ]) {
    const track = trackOf(report, source),
      line = lineOf(track, name),
      limit = lineOf(track, "memory/limit");
    const values = (line?.high ?? line?.mean ?? []).filter((value) => value !== null);
    if (values.length) {
      const most = Math.max(...values),
        cap = limit ? Math.max(...limit.mean.filter((value) => value !== null)) : 0;
      return { name: "peak memory", figure: formatBytes(most), remark: cap > 0 ? `of ${formatBytes(cap)}` : "" };
    }
  }
  return null;
}

function tile({ name, figure, remark, isGoal }) {
  return el(
    "div",
    { class: isGoal ? "tile goal" : "tile" },
    el("span", { class: "tile-name" }, name),
    el("strong", {}, figure),
    el("span", { class: "tile-remark" }, remark),
  );
}

/** Returns planned and actual figures as text, with their ratio. */
export function plannedRows(report) {
  return report.planned_vs_actual.map((one) => {
    const ratio = one.is_comparable && one.planned && one.actual ? one.actual / one.planned : null;
    return { ...one, planned: formatUnit(one.planned, one.unit), actual: formatUnit(one.actual, one.unit), ratio };
  });
}
