// The charts of one run.
import { el } from "./dom.js";
import { Chart } from "./chart.js";
import { seriesColour } from "./paint.js";
import { bandsOf, lineOf, marksOf, seriesOf, trackOf } from "./curves.js";
import { sayName } from "./words.js";

const MEMORY = [
  ["memory/allocated"],
  ["memory/reserved"],
  ["memory/process"],
  ["memory/used"],
  ["memory/swap"],
  ["memory/limit", true],
];
const USE = [["use/gpu"], ["use/cpu"], ["use/process"]];

/** What each chart shows: where its curves come from, and one plain sentence. */
function kinds(view) {
  const goal = view.report.goal?.name ?? null;
  const metrics = (trackOf(view, "eval")?.lines ?? [])
    .map((line) => line.name)
    .filter((name) => !name.startsWith("test_"));
  const others = metrics.filter((name) => name !== goal);
  const memory =
    trackOf(view, "health") && MEMORY.some(([name]) => lineOf(trackOf(view, "health"), name)) ? "health" : "epoch";
  const known = ["loss", "lr", "grad_norm", "samples_per_second"];
  const more = (trackOf(view, "step")?.lines ?? []).map((line) => line.name).filter((name) => !known.includes(name));
  return [
    {
      id: "loss",
      title: "training loss",
      says: "How wrong the model is on the samples it trains on. Lower is better.",
      from: "step",
      names: [["loss"]],
      logs: true,
      wide: true,
    },
    goal && {
      id: "goal",
      title: sayName(goal),
      says: "How good the model is on samples it does not train on: the figure that counts.",
      from: "eval",
      names: [[goal]],
      wide: true,
    },
    ...others.slice(0, 8).map((name) => ({
      id: `metric-${name}`,
      title: sayName(name),
      says: "Also measured on samples the model does not train on.",
      from: "eval",
      names: [[name]],
      logs: true,
    })),
    {
      id: "speed",
      title: "speed",
      says: "Samples trained in each second; evaluations and saves are left out.",
      from: "step",
      names: [["samples_per_second"]],
      floor: 0,
    },
    {
      id: "memory",
      title: "memory",
      says: "Who holds how much. Beyond the limit a run is slowed down by swapping, or fails.",
      from: memory,
      names: MEMORY,
      floor: 0,
    },
    {
      id: "use",
      title: "use of the machine",
      says: "How busy the processors were. Low values mean that they waited for something.",
      from: "health",
      names: USE,
      floor: 0,
    },
    {
      id: "lr",
      title: "learning rate",
      says: "How far each step moves the weights: the schedule you chose.",
      from: "step",
      names: [["lr"]],
      floor: 0,
      steady: true,
    },
    {
      id: "grad-norm",
      title: "gradient norm",
      says: "How hard the samples of a step pull at the weights. Peaks are unusual batches.",
      from: "step",
      names: [["grad_norm"]],
      logs: true,
      floor: 0,
    },
    ...more.slice(0, 6).map((name) => ({
      id: `step-${name}`,
      title: sayName(name),
      says: "Written down at every step.",
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

  show(view) {
    const { axis } = this.settings;
    const marks = marksOf(view, axis),
      bands = bandsOf(view, axis);
    const names = namesOn(view);
    let before = null;
    for (const kind of kinds(view)) {
      const track = trackOf(view, kind.from);
      const lines = kind.names
        .map(([name, dashed], place) => ({ line: lineOf(track, name), dashed, place }))
        .filter(({ line }) => line && !isSaidTwice(line, track, names));
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
        // In its place: what counts is often evaluated later than other curves begin.
        if (before) before.after(chart.element);
        else this.element.prepend(chart.element);
      }
      const series = lines.map(({ line, dashed, place }) =>
        seriesOf(track, line, axis, {
          label: names[line.name] ?? sayName(line.name),
          colour: dashed ? "bad" : seriesColour(place),
          dashed,
          steady: kind.steady,
        }),
      );
      chart.extent = extentOf(view, axis);
      chart.show(series, { bands, marks: kind.wide ? marks : [] });
      before = chart.element;
    }
  }

  close() {
    for (const chart of this.charts.values()) chart.close();
  }
}

/** Where there is no counter for tensors: what is counted is the process. */
export function isOnCpu(view) {
  return view.report.settings.find((setting) => setting.name === "device")?.value === "cpu";
}

function namesOn(view) {
  return isOnCpu(view) ? { "memory/allocated": "this process" } : {};
}

function isSaidTwice(line, track, names) {
  return line.name === "memory/allocated" && line.name in names && lineOf(track, "memory/process") !== null;
}

/** From the first to the last step, so that all charts have the same axis. */
export function extentOf(view, axis) {
  const places = view.tracks
    .flatMap((track) => [track[axis][0], track[axis][track[axis].length - 1]])
    .filter((place) => place !== null && place !== undefined);
  return places.length ? [Math.min(0, ...places), Math.max(...places)] : [0, 1];
}
