// Where the time of the run was spent, by phase and by epoch.
import { el, section, table } from "./dom.js";
import { dot } from "./paint.js";
import { formatBytes, formatPercent, formatSeconds } from "./format.js";

const COLORS = {
  data: "series-2",
  transfer: "series-6",
  forward: "series-1",
  backward: "series-5",
  optimizer: "series-3",
  evaluate: "series-4",
  save: "series-7",
  cooldown: "series-8",
};
const MOST_EPOCHS = 60;

export function timePart(report) {
  if (!report.phases.length) return null;
  const rows = report.phases.map((phase) => [
    el("span", { class: "named" }, dot(COLORS[phase.name] ?? "series-8"), phase.name),
    formatPercent(phase.share),
    formatSeconds(phase.seconds),
    phase.note,
  ]);
  const bar = el(
    "div",
    {
      class: "stack",
      role: "img",
      "aria-label": report.phases.map((phase) => `${phase.name} ${formatPercent(phase.share)}`).join(", "),
    },
    report.phases
      .filter((phase) => phase.share > 0.001)
      .map((phase) =>
        el(
          "div",
          {
            title: `${phase.name} ${formatPercent(phase.share)}`,
            style: { "flex-grow": String(phase.share), background: `var(--${COLORS[phase.name] ?? "series-8"})` },
          },
          phase.share > 0.09 ? el("span", {}, phase.name) : null,
        ),
      ),
  );
  return section(
    "time",
    "Where the time went",
    "Forward, backward and optimizer are training itself; everything else is overhead.",
    el(
      "div",
      { class: "card" },
      bar,
      table(["phase", "share", "time", "what it is"], rows, { class: "plain stacked parted" }),
    ),
    epochsOf(report),
  );
}

function epochsOf(report) {
  const all = report.epochs,
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
      { class: "caption" },
      `One bar per epoch. Growing bars mean that something slows the machine down.${left}`,
    ),
    el(
      "div",
      { class: "epochs" },
      shown.map((epoch) => {
        const words = `epoch ${epoch.epoch}: ${formatSeconds(epoch.seconds)}${epoch.memory_bytes ? `, ${formatBytes(epoch.memory_bytes)}` : ""}`;
        return el(
          "div",
          { class: "epoch", title: words },
          shown.length <= 16 ? el("b", {}, formatSeconds(epoch.seconds)) : null,
          el("div", { class: "pole", style: { height: `${most > 0 ? 4 + (64 * epoch.seconds) / most : 4}px` } }),
          shown.length <= 30 ? el("span", {}, String(epoch.epoch)) : null,
          el("span", { class: "unseen" }, words),
        );
      }),
    ),
  );
}
