// What matters most about a run, at one glance.
import { el, pill } from "./dom.js";
import { inUnit, showBytes, showCount, showDate, showNumber, showPercent, showSeconds } from "./words.js";
import { lineOf, trackOf } from "./curves.js";

const STATES = { done: "good", running: "live", stopped: "warn", failed: "bad" };

export function statePill(state) {
  return pill(state, STATES[state] ?? "plain");
}

/** Name, state, one sentence, and the figures. */
export function runHead(view) {
  const { report } = view;
  return el(
    "header",
    { class: "hero" },
    el("div", { class: "title" }, el("h1", {}, view.name), statePill(report.state)),
    el("p", { class: "lead" }, leadOf(view)),
    progressOf(report),
    report.failure ? el("p", { class: "notice bad" }, el("b", {}, "It failed. "), report.failure) : null,
    inexactOf(report),
    report.damaged_lines
      ? el("p", { class: "notice warn" }, `${showCount(report.damaged_lines)} damaged lines of the log were left out.`)
      : null,
    el("div", { class: "tiles" }, tilesOf(view).map(tile)),
  );
}

function leadOf(view) {
  const { report } = view;
  const parts = [`${report.recipe} on ${report.machine || "an unknown machine"}`];
  if (report.sittings) parts.push(`begun ${showDate(report.created)}`);
  if (report.sittings > 1) parts.push(`${report.sittings} sittings`);
  return `${parts.join(" · ")}.`;
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
    `Not bit-exact since step ${showCount(report.inexact_since)}: ${report.inexact_reason}`,
  );
}

/** The newest and best values of a run; each with a name, a figure and a remark. */
export function tilesOf(view) {
  const { report } = view;
  const tiles = [];
  const { loss, goal } = report;
  if (loss.last !== null) {
    tiles.push({
      name: "training loss",
      figure: showNumber(loss.last),
      remark: loss.first === null ? "" : `${showNumber(loss.first)} at the start`,
    });
  }
  if (goal?.last !== null && goal !== null) {
    const best =
      goal.best === goal.last
        ? "its best so far"
        : `best ${showNumber(goal.best)} at step ${showCount(goal.best_step ?? 0)}`;
    tiles.push({ name: goal.name.replaceAll("_", " "), figure: showNumber(goal.last), remark: best, isGoal: true });
    const test = report.metrics[`test_${goal.name}`];
    if (test !== undefined) {
      const beside = Object.entries(report.baseline).map(([name, value]) => `${name}: ${showNumber(value)}`)[0];
      tiles.push({
        name: `test ${goal.name.replaceAll("_", " ")}`,
        figure: showNumber(test),
        remark: beside ?? "on data kept aside",
      });
    }
  }
  const of = report.total_steps ? `of ${showCount(report.total_steps)}` : "";
  tiles.push({
    name: "steps",
    figure: showCount(report.step),
    remark: [of, report.samples ? `${showCount(report.samples)} samples` : ""].filter(Boolean).join(", "),
  });
  const speed = view.foretold.find((one) => one.name === "speed")?.happened;
  if (speed)
    tiles.push({ name: "speed", figure: showNumber(Number(speed.toPrecision(3))), remark: "samples per second" });
  if (report.training_seconds) {
    const teaching = view.phases
      .filter((phase) => ["forward", "backward", "optimizer"].includes(phase.name))
      .reduce((sum, phase) => sum + phase.share, 0);
    tiles.push({
      name: "time at work",
      figure: showSeconds(report.training_seconds),
      remark: teaching ? `${showPercent(teaching)} of it in the model` : "",
    });
  }
  const memory = mostMemory(view);
  if (memory) tiles.push(memory);
  return tiles;
}

function mostMemory(view) {
  for (const [source, name] of [
    ["health", "memory/peak"],
    ["health", "memory/allocated"],
    ["epoch", "memory/peak"],
    ["epoch", "memory/allocated"],
  ]) {
    const track = trackOf(view, source),
      line = lineOf(track, name),
      limit = lineOf(track, "memory/limit");
    const values = (line?.high ?? line?.mean ?? []).filter((value) => value !== null);
    if (values.length) {
      const most = Math.max(...values),
        cap = limit ? Math.max(...limit.mean.filter((value) => value !== null)) : 0;
      return { name: "most memory", figure: showBytes(most), remark: cap > 0 ? `of ${showBytes(cap)}` : "" };
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

/** Foretold and come, side by side. */
export function foretoldRows(view) {
  return view.foretold.map((one) => {
    const ratio = one.alike && one.planned && one.happened ? one.happened / one.planned : null;
    return { ...one, planned: inUnit(one.planned, one.unit), happened: inUnit(one.happened, one.unit), ratio };
  });
}
