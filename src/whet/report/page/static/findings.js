// How good is each class, which are taken for which, and what do some samples look like?
import { el, section, table } from "./dom.js";
import { showCount, showPercent } from "./words.js";

const PARTS = { dev: "held-out", test: "test" };

export function findingsPart(view) {
  const { classes = [], confusions, samples } = view.findings;
  if (!classes.length && !confusions.length && !samples.length) return null;
  return section(
    "findings",
    "Right and wrong",
    "What the model makes of samples it did not train on.",
    classes.map(classesOf),
    confusions.map(confusionOf),
    samples.map(samplesOf),
  );
}

function classesOf({ part, step, labels, columns, rows }) {
  const shown = (value, name) => (name === "support" ? showCount(value) : value.toFixed(3));
  return el(
    "div",
    { class: "card" },
    el("h3", {}, `each class, ${PARTS[part]} data, step ${showCount(step)}`),
    el(
      "p",
      { class: "says" },
      "Precision: how many of its answers are right. Recall: how many of its samples are found. F1: both in one. Support: how many samples there are.",
    ),
    table(
      ["class", ...columns],
      rows.map((row, place) => [labels[place], ...row.map((value, column) => shown(value, columns[column]))]),
      { class: "plain" },
    ),
  );
}

function confusionOf({ part, step, labels, counts }) {
  const head = el(
    "tr",
    {},
    el("td", {}),
    labels.map((label) => el("th", { scope: "col" }, el("span", {}, label))),
    el("th", { scope: "col" }, "right"),
  );
  const rows = labels.map((label, truth) => {
    const all = counts[truth].reduce((sum, count) => sum + count, 0);
    return el(
      "tr",
      {},
      el("th", { scope: "row" }, label),
      counts[truth].map((count, guess) => {
        const share = all ? count / all : 0;
        return el(
          "td",
          {
            class: guess === truth ? "hit" : "miss",
            style: { "--share": `${100 * Math.sqrt(share)}%` },
            title: `${label} taken for ${labels[guess]}: ${count} of ${all}`,
          },
          count ? showCount(count) : "",
        );
      }),
      el("td", { class: "sum" }, all ? showPercent(counts[truth][truth] / all) : "–"),
    );
  });
  return el(
    "div",
    { class: "card" },
    el("h3", {}, `confusion matrix, ${PARTS[part]} data, step ${showCount(step)}`),
    el(
      "p",
      { class: "says" },
      "Each row is what the samples are, each column what the model took them for. A good model fills the diagonal.",
    ),
    el("div", { class: "scroll" }, el("table", { class: "confusion" }, el("thead", {}, head), el("tbody", {}, rows))),
  );
}

function samplesOf({ part, step, columns, rows }) {
  return el(
    "div",
    { class: "card" },
    el("h3", {}, `some samples, ${PARTS[part]} data, step ${showCount(step)}`),
    el("p", { class: "says" }, "As the evaluation chose them; it helps to read what a model gets wrong."),
    table(columns, rows, { class: "plain stacked samples" }),
  );
}
