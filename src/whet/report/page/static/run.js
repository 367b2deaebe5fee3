// The page of one run: showRun(element, view) draws it, and what it returns takes newer views.
import { el, fill } from "./dom.js";
import { Settings, settingsBar } from "./settings.js";
import { RunCharts } from "./run_charts.js";
import { runHead } from "./head.js";
import { timePart } from "./time.js";
import { evidencePart, foretoldPart, planPart } from "./plan.js";
import { advicePart, storyPart } from "./story.js";
import { findingsPart } from "./findings.js";
import { originPart } from "./origin.js";

const PARTS = [storyPart, timePart, advicePart, findingsPart, evidencePart, planPart, foretoldPart, originPart];

function linkTo({ id, title }) {
  const go = (event) => (event.preventDefault(), document.getElementById(id).scrollIntoView({ behavior: "smooth" }));
  return el("a", { href: `#${id}`, onclick: go }, title);
}

/** The links to the parts; those that are right stay, so that a press on one is not lost to news. */
function showLinks(nav, parts) {
  const wanted = parts.map((part) => ({ id: part.id, title: part.querySelector("h2").textContent }));
  const titles = wanted.map(({ title }) => title);
  if (titles.join() !== [...nav.children].map((link) => link.textContent).join()) fill(nav, wanted.map(linkTo));
}

/** Draws a run. Returns {settings, update(view), close()}. */
export function showRun(element, view) {
  const settings = new Settings("whet-run");
  const charts = new RunCharts(settings);
  const head = el("div", {});
  const places = PARTS.map((make) => ({ make, place: el("div", { class: "place" }), seen: "" }));
  const curves = el(
    "section",
    { id: "curves", class: "part", "aria-labelledby": "curves-title" },
    el(
      "header",
      { class: "part-head" },
      el("h2", { id: "curves-title" }, "Curves"),
      el("p", { class: "says" }, "How the run went. Shaded stretches: steps became slower, as by heat, or memory was short."),
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
  let current = view;
  settings.onaxis = () => charts.show(current);
  const update = (newer) => {
    current = newer;
    fill(head, runHead(newer));
    charts.show(newer);
    for (const part of places) {
      const made = part.make(newer);
      const text = made?.textContent ?? "";
      // What did not change stays as it is: somebody may have opened something in it.
      if (text !== part.seen || !part.place.childElementCount) fill(part.place, made ?? []);
      part.seen = text;
    }
    curves.hidden = !charts.charts.size;
    showLinks(nav, [...element.querySelectorAll("section.part:not([hidden])")]);
  };
  update(view);
  return { settings, update, close: () => charts.close() };
}
