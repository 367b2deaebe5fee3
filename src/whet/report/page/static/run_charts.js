// The charts of one run.
import { el, fill } from "./dom.js";
import { Chart } from "./chart.js";
import { seriesColor } from "./paint.js";
import { bandsOf, lineOf, marksOf, rollingMedian, seriesOf, trackOf } from "./curves.js";
import { betterText, displayName } from "./format.js";
import { lossesOf, metricGroups, scalarGroups, validationLoss } from "./metrics.js";

const MEMORY = ["allocated", "reserved", "process", "used", "swap", "limit"].map((name) => `memory/${name}`);
const USE = ["gpu", "cpu", "process"].map((name) => `utilization/${name}`);
const HELD_OUT = "On samples that the model is not trained on.";

/** Returns the charts of a run, with curves as [source, name] and a caption. */
function kinds(report) {
  const steps = (...names) => names.map((name) => ["step", name]);
  const health = trackOf(report, "health");
  const memory = health && MEMORY.some((name) => lineOf(health, name)) ? "health" : "epoch";
  const validation = validationLoss(report);
  return [
    {
      id: "loss",
      title: "loss",
      caption: `${validation ? "On training and on validation samples." : "On training samples."} Lower is better.`,
      curves: [...steps(...lossesOf(report)), ...(validation ? [["eval", validation]] : [])],
      logs: true,
      wide: true,
    },
    ...metricGroups(report).map(({ names, mode, title, isGoal }) => ({
      id: `metric-${names[0]}`,
      title,
      caption: `${HELD_OUT} ${betterText(mode)}`,
      curves: names.map((name) => ["eval", name]),
      logs: mode === "min",
      wide: isGoal,
    })),
    {
      id: "speed",
      title: "speed",
      caption: "Samples per second: a rolling median, with the range of all steps.",
      curves: steps("samples_per_second"),
      floor: 0,
      isMedian: true,
    },
    {
      id: "memory",
      title: "memory",
      caption: "Memory in use. Beyond the limit a run swaps or fails.",
      curves: MEMORY.map((name) => [memory, name]),
      floor: 0,
    },
    {
      id: "use",
      title: "utilization",
      caption: "How busy the processors were. Low values mean that they were waiting.",
      curves: USE.map((name) => ["health", name]),
      floor: 0,
    },
    {
      id: "lr",
      title: "learning rate",
      caption: "The learning rate schedule.",
      curves: steps("lr"),
      floor: 0,
      steady: true,
    },
    {
      id: "grad-norm",
      title: "gradient norm",
      caption: "The norm of the gradients. Peaks are unusual batches.",
      curves: steps("grad_norm"),
      logs: true,
      floor: 0,
    },
    ...scalarGroups(report).map(({ names, mode, title }) => ({
      id: `step-${names[0]}`,
      title,
      caption: `Logged with each step. ${betterText(mode)}`,
      curves: steps(...names),
      logs: true,
    })),
  ];
}

export class RunCharts {
  constructor(settings) {
    this.settings = settings;
    this.charts = new Map();
    this.element = el("div", { class: "charts" });
  }

  show(report) {
    const { axis } = this.settings;
    const marks = marksOf(report, axis),
      bands = bandsOf(report, axis);
    let before = null;
    for (const kind of kinds(report)) {
      const lines = kind.curves
        .map(([source, name], place) => ({ track: trackOf(report, source), name, place }))
        .map((one) => ({ ...one, line: lineOf(one.track, one.name) }))
        .filter(({ line, track }) => line && !isUseless(line, track, report));
      // Skip single values, which the figures at the top already show.
      if (!lines.some(({ line }) => kind.id === "loss" || numValues(line) > 1)) continue;
      let chart = this.charts.get(kind.id);
      if (!chart) {
        chart = new Chart(this.settings, {
          ...kind,
          id: `chart-${kind.id.replace(/[^A-Za-z0-9-]/g, "-")}`,
          height: kind.wide ? 260 : 190,
        });
        if (kind.wide) chart.element.classList.add("wide");
        this.charts.set(kind.id, chart);
        // Insert the chart in order, because some curves, such as the goal, begin later than others.
        if (before) before.after(chart.element);
        else this.element.prepend(chart.element);
      }
      const series = lines.map(({ track, line, place }) => this.series(report, kind, track, line, place));
      // The validation loss begins later than the training loss.
      fill(chart.caption, kind.caption);
      chart.extent = extentOf(report, axis);
      chart.show(series, { bands, marks: kind.wide ? marks : [] });
      before = chart.element;
    }
  }

  series(report, kind, track, line, place) {
    const isLimit = line.name === "memory/limit";
    const made = seriesOf(track, line, this.settings.axis, {
      label: labelOf(report, kind, line),
      color: isLimit ? "bad" : seriesColor(place),
      dashed: isLimit,
      steady: kind.steady || kind.isMedian,
    });
    // The newest step, as in the figures at the top. The last point of the curve is a mean over several steps.
    if (kind.id === "loss" && track.source === "step") made.newest = report.losses[line.name] ?? report.loss;
    return kind.isMedian ? { ...made, raw: made.ys, ys: rollingMedian(made.ys) } : made;
  }

  close() {
    for (const chart of this.charts.values()) chart.close();
  }
}

/** Returns whether the run is on the CPU, which has no memory counter for tensors, only for the process. */
export function isOnCpu(report) {
  return report.settings.find((setting) => setting.name === "device")?.value === "cpu";
}

function labelOf(report, kind, line) {
  if (kind.id === "loss" && !(line.name in report.losses)) return line.name === "loss" ? "training" : "validation";
  return line.name === "memory/allocated" && isOnCpu(report) ? "this process" : displayName(line.name);
}

function numValues(line) {
  return line.mean.filter((value) => value !== null).length + line.nonfinite;
}

function isUseless(line, track, report) {
  if (line.name === "memory/swap") return line.mean.every((value) => !value);
  return line.name === "memory/allocated" && isOnCpu(report) && lineOf(track, "memory/process") !== null;
}

/** Returns the range of the x axis from the first to the last step, which all charts share. */
export function extentOf(report, axis) {
  const places = report.tracks
    .flatMap((track) => [track[axis][0], track[axis][track[axis].length - 1]])
    .filter((place) => place !== null && place !== undefined);
  return places.length ? [Math.min(0, ...places), Math.max(...places)] : [0, 1];
}
