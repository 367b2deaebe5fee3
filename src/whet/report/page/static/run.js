// The page of one run.
import { el, fill } from "./dom.js";
import { Settings, settingsBar } from "./settings.js";
import { RunCharts } from "./run_charts.js";
import { runSummary } from "./summary.js";
import { timePart } from "./time.js";
import { evidencePart, plannedPart, planPart } from "./plan.js";
import { advicePart, timelinePart } from "./timeline.js";
import { evaluationPart } from "./evaluation.js";
import { provenancePart } from "./provenance.js";

const PARTS = [timelinePart, timePart, advicePart, evaluationPart, evidencePart, planPart, plannedPart, provenancePart];

function linkTo({ id, title }) {
  const go = (event) => (event.preventDefault(), document.getElementById(id).scrollIntoView({ behavior: "smooth" }));
  return el("a", { href: `#${id}`, onclick: go }, title);
}

/** Updates the links to the sections, but only if they have changed, so that a click in progress is not lost. */
function showLinks(nav, parts) {
  const wanted = parts.map((part) => ({ id: part.id, title: part.querySelector("h2").textContent }));
  const titles = wanted.map(({ title }) => title);
  if (titles.join() !== [...nav.children].map((link) => link.textContent).join()) fill(nav, wanted.map(linkTo));
}

/** Draws a run into an element. Returns {settings, update(report), close()}. */
export function showRun(element, report) {
  const settings = new Settings("whet-run");
  const charts = new RunCharts(settings);
  const head = el("div", {});
  const places = PARTS.map((make) => ({ make, place: el("div", { class: "place" }), seen: "" }));
  const shading = el(
    "p",
    { class: "caption" },
    "Shaded: steps were clearly slower for a while, because of heat, low power, memory pressure or other programs.",
  );
  const curves = el(
    "section",
    { id: "curves", class: "part", "aria-labelledby": "curves-title" },
    el(
      "header",
      { class: "part-head" },
      el("h2", { id: "curves-title" }, "Curves"),
      shading,
    ),
    settingsBar(settings),
    charts.element,
  );
  const nav = el("nav", { class: "parts", "aria-label": "parts of this page" });
  fill(
    element,
    head,
    nav,
    curves,
    places.map(({ place }) => place),
  );
  let current = report;
  settings.onaxis = () => charts.show(current);
  const update = (newer) => {
    current = newer;
    fill(head, runSummary(newer));
    charts.show(newer);
    shading.hidden = !newer.slow_periods.length;
    for (const part of places) {
      const made = part.make(newer);
      const text = made?.textContent ?? "";
      // Keep an unchanged section, because the user may have opened a disclosure in it.
      if (text !== part.seen || !part.place.childElementCount) fill(part.place, made ?? []);
      part.seen = text;
    }
    curves.hidden = !charts.charts.size;
    showLinks(nav, [...element.querySelectorAll("section.part:not([hidden])")]);
  };
  update(report);
  return { settings, update, close: () => charts.close() };
}
