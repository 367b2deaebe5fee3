// Several runs side by side: their key figures, their differences, and their curves on a common axis.
import { disclosure, el, fill, section, table } from "./dom.js";
import { Chart } from "./chart.js";
import { dot, seriesColor } from "./paint.js";
import { lineOf, rollingMedian, seriesOf, trackOf } from "./curves.js";
import { Settings, settingsBar } from "./settings.js";
import { extentOf, isOnCpu } from "./run_charts.js";
import { statePill, tilesOf } from "./summary.js";
import { betterText, displayName } from "./format.js";
import { lossesOf, modeOf } from "./metrics.js";

/** Draws a comparison into an element. Returns {settings, update(comparison), close()}. */
export function showComparison(element, comparison) {
  const settings = new Settings("whet-comparison");
  const charts = new Map();
  const grid = el("div", { class: "charts" });
  const head = el("div", {}),
    differences = el("div", {});
  const curves = section(
    "curves",
    "Curves",
    "All runs over the same axis: by step, by samples or by training time.",
    settingsBar(settings),
    grid,
  );
  fill(element, head, differences, curves);
  let current = comparison;
  const draw = () => drawCharts(current, settings, charts, grid);
  settings.onaxis = draw;
  const update = (newer) => {
    current = newer;
    fill(head, headOf(newer));
    fill(differences, differencesOf(newer));
    draw();
  };
  update(comparison);
  return { settings, update, close: () => charts.forEach((chart) => chart.close()) };
}

function headOf({ runs, labels }) {
  const figures = runs.map((report) => new Map(tilesOf(report).map((tile) => [tile.name, tile.figure])));
  const names = [...new Set(figures.flatMap((one) => [...one.keys()]))];
  const header = ["", ...labels.map((label, place) => el("span", { class: "named" }, dot(seriesColor(place)), label))];
  const rows = [
    ["state", ...runs.map((report) => statePill(report.state))],
    ...names.map((name) => [name, ...figures.map((one) => one.get(name) ?? "–")]),
  ];
  return el(
    "header",
    { class: "hero" },
    el("h1", {}, `${runs.length} runs side by side`),
    el("p", { class: "lead" }, "Key figures, and below what differs between the runs."),
    el("div", { class: "card scroll" }, table(header, rows, { class: "plain figures" })),
  );
}

function differencesOf({ labels, settings, config, environment }) {
  const parts = [
    ["settings of the plan", settings],
    ["your configuration", config],
    ["environment", environment],
  ];
  const header = ["", ...labels];
  const shown = parts.map(([title, rows]) => {
    const isEverywhere = (row) => row.values.every((value) => value !== null);
    const different = rows.filter((row) => row.differs && isEverywhere(row)),
      same = rows.filter((row) => !row.differs);
    const partly = rows.filter((row) => row.differs && !isEverywhere(row));
    return el(
      "div",
      { class: "card" },
      el("h3", {}, title),
      different.length
        ? el("div", { class: "scroll" }, table(header, different.map(cells), { class: "plain differs" }))
        : el("p", { class: "caption" }, partly.length ? "No value that all runs have differs." : "Nothing differs."),
      partly.length
        ? disclosure(`${partly.length} that only some runs have`, () =>
            el("div", { class: "scroll" }, table(header, partly.map(cells), { class: "plain" })),
          )
        : null,
      same.length
        ? disclosure(`${same.length} the same`, () =>
            el("div", { class: "scroll" }, table(header, same.map(cells), { class: "plain" })),
          )
        : null,
    );
  });
  return section(
    "differences",
    "What is different",
    "Only differences can explain different results.",
    shown,
  );
}

function cells(row) {
  return [el("code", {}, row.name), ...row.values.map((value) => value ?? "–")];
}

function kindsOf(runs) {
  const lines = runs.flatMap((report) =>
    (trackOf(report, "eval")?.lines ?? []).map((line) => [line.name, modeOf(report, line)]),
  );
  const metrics = [...new Map(lines)].filter(([name]) => !name.startsWith("test_"));
  const goals = new Set(runs.map((report) => report.goal));
  metrics.sort(([a], [b]) => Number(goals.has(b)) - Number(goals.has(a)));
  const losses = [...new Set(runs.flatMap(lossesOf))];
  return [
    ...losses.map((name) => [
      "step",
      name,
      name === "loss" ? "training loss" : displayName(name),
      "On training samples. Lower is better.",
      { logs: true, wide: true },
    ]),
    ...metrics
      .slice(0, 8)
      .map(([name, mode]) => [
        "eval",
        name,
        displayName(name),
        `On samples that the models are not trained on. ${betterText(mode)}`,
        { wide: goals.has(name), logs: true },
      ]),
    ["step", "samples_per_second", "speed", "Samples per second: rolling median. Higher is better.", { floor: 0 }],
    ["health", "memory/process", "memory of the process", "Memory of each process.", { floor: 0 }],
    ...(runs.every(isOnCpu)
      ? [] // On the CPU, this would repeat the memory of the process.
      : [["health", "memory/allocated", "memory of tensors", "Memory of the tensors on the device.", { floor: 0 }]]),
    ["health", "utilization/gpu", "GPU utilization", "How busy the GPU was.", { floor: 0 }],
    ["step", "lr", "learning rate", "The learning rate schedules.", { floor: 0, steady: true }],
    ["step", "grad_norm", "gradient norm", "The norm of the gradients. Peaks are unusual batches.", { floor: 0, logs: true }],
  ];
}

function drawCharts({ runs, labels }, settings, charts, grid) {
  const extents = runs.map((report) => extentOf(report, settings.axis));
  let before = null;
  for (const [source, name, title, caption, more] of kindsOf(runs)) {
    const series = runs.flatMap((report, place) => {
      const track = trackOf(report, source),
        line = lineOf(track, name);
      if (!line) return [];
      const made = seriesOf(track, line, settings.axis, {
        label: labels[place],
        color: seriesColor(place),
        steady: more.steady,
      });
      const ys = name === "samples_per_second" ? rollingMedian(made.ys) : made.ys;
      return [{ ...made, ys, low: null, high: null }];
    });
    if (!series.length) continue;
    const key = `${source}/${name}`;
    if (!charts.has(key)) {
      const chart = new Chart(settings, { ...more, isNamed: true, title, caption, height: more.wide ? 260 : 190 });
      if (more.wide) chart.element.classList.add("wide");
      charts.set(key, chart);
      if (before) before.after(chart.element);
      else grid.prepend(chart.element);
    }
    const chart = charts.get(key);
    chart.extent = [Math.min(...extents.map(([from]) => from)), Math.max(...extents.map(([, to]) => to))];
    chart.show(series);
    before = chart.element;
  }
}
