// Details of the newest evaluations: scores per class, confusion matrices and samples.
import { el, section, table } from "./dom.js";
import { formatCount, formatPercent } from "./format.js";

const SPLITS = { val: "validation", test: "test" };

export function evaluationPart(report) {
  const { classes = [], confusions, samples } = report.details;
  if (!classes.length && !confusions.length && !samples.length) return null;
  return section(
    "evaluation",
    "Evaluation",
    "Results on samples that the model is not trained on.",
    classes.map(classesOf),
    confusions.map(confusionOf),
    samples.map(samplesOf),
  );
}

function classesOf({ split, step, labels, columns, rows }) {
  const shown = (value, name) => (name === "support" ? formatCount(value) : value.toFixed(3));
  return el(
    "div",
    { class: "card" },
    el("h3", {}, `scores per class, ${SPLITS[split]} data, step ${formatCount(step)}`),
    el(
      "p",
      { class: "caption" },
      "Precision: the share of its predictions that are right. Recall: the share of its samples that are found. F1: their harmonic mean. Support: the number of samples.",
    ),
    table(
      ["class", ...columns],
      rows.map((row, place) => [labels[place], ...row.map((value, column) => shown(value, columns[column]))]),
      { class: "plain" },
    ),
  );
}

function confusionOf({ split, step, labels, counts }) {
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
            title: `${label} predicted as ${labels[guess]}: ${count} of ${all}`,
          },
          count ? formatCount(count) : "",
        );
      }),
      el("td", { class: "sum" }, all ? formatPercent(counts[truth][truth] / all) : "–"),
    );
  });
  return el(
    "div",
    { class: "card" },
    el("h3", {}, `confusion matrix, ${SPLITS[split]} data, step ${formatCount(step)}`),
    el(
      "p",
      { class: "caption" },
      "Rows are true classes, columns are predicted classes. A good model fills the diagonal.",
    ),
    el("div", { class: "scroll" }, el("table", { class: "confusion" }, el("thead", {}, head), el("tbody", {}, rows))),
  );
}

function samplesOf({ split, step, columns, rows }) {
  return el(
    "div",
    { class: "card" },
    el("h3", {}, `some samples, ${SPLITS[split]} data, step ${formatCount(step)}`),
    el("p", { class: "caption" }, "Selected by the evaluation; reading what a model gets wrong helps to improve it."),
    table(columns, rows, { class: "plain stacked samples" }),
  );
}
