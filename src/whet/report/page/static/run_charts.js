// The charts of one run.
import { el } from "./dom.js";
import { Chart } from "./chart.js";
import { seriesColor } from "./paint.js";
import { bandsOf, lineOf, marksOf, seriesOf, trackOf } from "./curves.js";
import { displayName } from "./format.js";

const MEMORY = [
  ["memory/allocated"],
  ["memory/reserved"],
  ["memory/process"],
  ["memory/used"],
  ["memory/swap"],
  ["memory/limit", true],
];
const USE = [["utilization/gpu"], ["utilization/cpu"], ["utilization/process"]];

/** What each chart shows: where its curves come from, and one plain sentence. */
function kinds(report) {
  const goal = report.goal;
  const metrics = (trackOf(report, "eval")?.lines ?? [])
    .map((line) => line.name)
    .filter((name) => !name.startsWith("test_"));
  const others = metrics.filter((name) => name !== goal);
  const memory =
    trackOf(report, "health") && MEMORY.some(([name]) => lineOf(trackOf(report, "health"), name)) ? "health" : "epoch";
  const known = ["loss", "lr", "grad_norm", "samples_per_second"];
  const more = (trackOf(report, "step")?.lines ?? []).map((line) => line.name).filter((name) => !known.includes(name));
  return [
    {
      id: "loss",
      title: "training loss",
      caption: "The loss on training samples. Lower is better.",
      from: "step",
      names: [["loss"]],
      logs: true,
      wide: true,
    },
    goal && {
      id: "goal",
      title: displayName(goal),
      caption: "The goal metric, on samples the model does not train on.",
      from: "eval",
      names: [[goal]],
      wide: true,
    },
    ...others.slice(0, 8).map((name) => ({
      id: `metric-${name}`,
      title: displayName(name),
      caption: "Also measured on samples the model does not train on.",
      from: "eval",
      names: [[name]],
      logs: true,
    })),
    {
      id: "speed",
      title: "speed",
      caption: "Samples trained in each second; evaluations and saves are left out.",
      from: "step",
      names: [["samples_per_second"]],
      floor: 0,
    },
    {
      id: "memory",
      title: "memory",
      caption: "Memory in use. Beyond the limit a run swaps or fails.",
      from: memory,
      names: MEMORY,
      floor: 0,
    },
    {
      id: "use",
      title: "utilization",
      caption: "How busy the processors were. Low values mean that they were waiting.",
      from: "health",
      names: USE,
      floor: 0,
    },
    {
      id: "lr",
      title: "learning rate",
      caption: "The learning rate schedule.",
      from: "step",
      names: [["lr"]],
      floor: 0,
      steady: true,
    },
    {
      id: "grad-norm",
      title: "gradient norm",
      caption: "The norm of the gradients. Peaks are unusual batches.",
      from: "step",
      names: [["grad_norm"]],
      logs: true,
      floor: 0,
    },
    ...more.slice(0, 6).map((name) => ({
      id: `step-${name}`,
      title: displayName(name),
      caption: "Logged at every step.",
      from: "step",
      names: [[name]],
      logs: true,
    })),
  ].filter(Boolean);
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
    const names = namesOn(report);
    let before = null;
    for (const kind of kinds(report)) {
      const track = trackOf(report, kind.from);
      const lines = kind.names
        .map(([name, dashed], place) => ({ line: lineOf(track, name), dashed, place }))
        .filter(({ line }) => line && !isDuplicate(line, track, names));
      if (!lines.length) continue;
      let chart = this.charts.get(kind.id);
      if (!chart) {
        chart = new Chart(this.settings, {
          ...kind,
          id: `chart-${kind.id.replace(/[^A-Za-z0-9-]/g, "-")}`,
          height: kind.wide ? 260 : 190,
        });
        if (kind.wide) chart.element.classList.add("wide");
        this.charts.set(kind.id, chart);
        // In its order: the goal is often evaluated later than other curves begin.
        if (before) before.after(chart.element);
        else this.element.prepend(chart.element);
      }
      const series = lines.map(({ line, dashed, place }) =>
        seriesOf(track, line, axis, {
          label: names[line.name] ?? displayName(line.name),
          color: dashed ? "bad" : seriesColor(place),
          dashed,
          steady: kind.steady,
        }),
      );
      chart.extent = extentOf(report, axis);
      chart.show(series, { bands, marks: kind.wide ? marks : [] });
      before = chart.element;
    }
  }

  close() {
    for (const chart of this.charts.values()) chart.close();
  }
}

/** On the CPU there is no counter for tensors: memory is that of the process. */
export function isOnCpu(report) {
  return report.settings.find((setting) => setting.name === "device")?.value === "cpu";
}

function namesOn(report) {
  return isOnCpu(report) ? { "memory/allocated": "this process" } : {};
}

function isDuplicate(line, track, names) {
  return line.name === "memory/allocated" && line.name in names && lineOf(track, "memory/process") !== null;
}

/** From the first to the last step, so that all charts have the same axis. */
export function extentOf(report, axis) {
  const places = report.tracks
    .flatMap((track) => [track[axis][0], track[axis][track[axis].length - 1]])
    .filter((place) => place !== null && place !== undefined);
  return places.length ? [Math.min(0, ...places), Math.max(...places)] : [0, 1];
}
