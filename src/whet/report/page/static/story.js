// What happened on the way, and what should be tried next?
import { disclosure, el, pill, section, table } from "./dom.js";
import { showCount, showSeconds } from "./words.js";

const FIRST = 12;

export function storyPart(view) {
  const moments = view.moments;
  if (!moments.length) return null;
  const telling = moments.filter((moment) => moment.kind !== "checkpoint" || moment.step === 0);
  const saves = moments.length - telling.length;
  const end = Math.max(
    1e-9,
    view.report.training_seconds,
    ...moments.map((moment) => moment.seconds),
    ...view.sittings.map((sitting) => sitting.begins_at),
  );
  const line = el(
    "div",
    { class: "timeline", "aria-hidden": "true" },
    view.spells.map((spell) =>
      el("i", {
        class: `spell ${spell.about}`,
        title: spell.reason,
        style: {
          left: `${(100 * spell.from_seconds) / end}%`,
          width: `${Math.max(0.4, (100 * (spell.to_seconds - spell.from_seconds)) / end)}%`,
        },
      }),
    ),
    view.sittings
      .slice(1)
      .map((sitting) => el("i", { class: "seam", style: { left: `${(100 * sitting.begins_at) / end}%` } })),
    moments.map((moment) =>
      el("i", {
        class: `moment ${moment.tone} ${moment.kind === "checkpoint" ? "small" : ""}`,
        title: `${moment.kind}: ${moment.words}`,
        style: { left: `${(100 * moment.seconds) / end}%` },
      }),
    ),
  );
  const left = view.moments_left_out
    ? el("p", { class: "says" }, `${showCount(view.moments_left_out)} more in the middle are left out here.`)
    : null;
  return section(
    "story",
    "What happened",
    "From the first second of work to the last. Orange and red are worth a look; small dots are checkpoints.",
    el(
      "div",
      { class: "card" },
      line,
      el("div", { class: "timeline-ends" }, el("span", {}, "start"), el("span", {}, showSeconds(end))),
      momentTable(telling.slice(0, FIRST)),
      telling.length > FIRST
        ? disclosure(`${telling.length - FIRST} more`, () => momentTable(telling.slice(FIRST)))
        : null,
      saves
        ? disclosure(`${saves} checkpoints`, () =>
            momentTable(moments.filter((moment) => moment.kind === "checkpoint" && moment.step)),
          )
        : null,
      left,
    ),
  );
}

function momentTable(moments) {
  return table(
    ["when", "step", "what", "told"],
    moments.map((moment) => [
      showSeconds(moment.seconds),
      showCount(moment.step),
      pill(moment.kind, moment.tone),
      moment.words,
    ]),
    { class: "plain stacked moments" },
  );
}

export function advicePart(view) {
  if (!view.advice.length) return null;
  return section(
    "advice",
    "What to try next",
    "Each line rests on a measurement of this run or of its plan. Nothing measured, nothing advised.",
    el(
      "ul",
      { class: "advice" },
      view.advice.map((one) => el("li", {}, el("b", {}, one.try_), el("span", {}, `Measured: ${one.measured}.`))),
    ),
  );
}
