// Where did the time go?
import { el, section, table } from "./dom.js";
import { dot } from "./paint.js";
import { showBytes, showPercent, showSeconds } from "./words.js";

const COLOURS = {
  data: "series-2",
  transfer: "series-6",
  forward: "series-1",
  backward: "series-5",
  optimizer: "series-3",
  evaluate: "series-4",
  save: "series-7",
  rest: "series-8",
};
const MOST_EPOCHS = 60;

export function timePart(view) {
  if (!view.phases.length) return null;
  const rows = view.phases.map((phase) => [
    el("span", { class: "named" }, dot(COLOURS[phase.name] ?? "series-8"), phase.name),
    showPercent(phase.share),
    showSeconds(phase.seconds),
    phase.words,
  ]);
  const bar = el(
    "div",
    {
      class: "stack",
      role: "img",
      "aria-label": view.phases.map((phase) => `${phase.name} ${showPercent(phase.share)}`).join(", "),
    },
    view.phases
      .filter((phase) => phase.share > 0.001)
      .map((phase) =>
        el(
          "div",
          {
            title: `${phase.name} ${showPercent(phase.share)}`,
            style: { "flex-grow": String(phase.share), background: `var(--${COLOURS[phase.name] ?? "series-8"})` },
          },
          phase.share > 0.09 ? el("span", {}, phase.name) : null,
        ),
      ),
  );
  return section(
    "time",
    "Where the time went",
    "Forward, backward and optimizer are the training itself; all else is the price of it.",
    el(
      "div",
      { class: "card" },
      bar,
      table(["part", "share", "time", "what it is"], rows, { class: "plain stacked parted" }),
    ),
    epochsOf(view),
  );
}

function epochsOf(view) {
  const all = view.report.epochs,
    shown = all.slice(-MOST_EPOCHS);
  if (!shown.length) return null;
  const most = Math.max(...shown.map((epoch) => epoch.seconds));
  const left = all.length > shown.length ? ` The last ${MOST_EPOCHS} of ${all.length}.` : "";
  return el(
    "div",
    { class: "card" },
    el("h3", {}, "time per epoch"),
    el(
      "p",
      { class: "says" },
      `One bar for each pass over the data. Bars that grow mean that something slows the machine down.${left}`,
    ),
    el(
      "div",
      { class: "epochs" },
      shown.map((epoch) => {
        const words = `epoch ${epoch.epoch}: ${showSeconds(epoch.seconds)}${epoch.memory_bytes ? `, ${showBytes(epoch.memory_bytes)}` : ""}`;
        return el(
          "div",
          { class: "epoch", title: words },
          shown.length <= 16 ? el("b", {}, showSeconds(epoch.seconds)) : null,
          el("div", { class: "pole", style: { height: `${most > 0 ? 4 + (64 * epoch.seconds) / most : 4}px` } }),
          shown.length <= 30 ? el("span", {}, String(epoch.epoch)) : null,
          el("span", { class: "unseen" }, words),
        );
      }),
    ),
  );
}
