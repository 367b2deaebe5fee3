// Settings that all charts of a page share (axis, smoothing, scale, zoom), and the toolbar that changes them.
import { el, fill } from "./dom.js";
import { AXES } from "./curves.js";

export class Settings {
  constructor(key) {
    this.key = key;
    this.axis = "step";
    this.smoothing = 0;
    this.log = false;
    this.zoomed = null;
    this.last = 1;
    this.theme = "";
    this.charts = new Set();
    this.onaxis = () => {};
    this.onzoom = () => {};
  }

  redraw() {
    for (const chart of this.charts) chart.draw();
  }

  setAxis(axis) {
    this.axis = axis;
    this.zoomed = null;
    this.onaxis();
    this.onzoom();
  }

  /** Zooms all charts to a range of the axis, or shows all of it for null. */
  setZoom(range) {
    this.zoomed = range;
    this.onzoom();
    this.redraw();
  }

  zoomOver([from, to]) {
    if (this.zoomed) return this.zoomed;
    return [to - (to - from) * this.last, to];
  }
}

/** Creates the toolbar above the charts. */
export function settingsBar(settings) {
  const axes = Object.entries(AXES).map(([axis, words]) =>
    el(
      "button",
      {
        type: "button",
        "data-axis": axis,
        "aria-pressed": String(axis === settings.axis),
        onclick: () => choose(axis),
      },
      words,
    ),
  );
  const choose = (axis) => {
    for (const button of axes) button.setAttribute("aria-pressed", String(button.dataset.axis === axis));
    settings.setAxis(axis);
  };
  const value = el("output", {}, "off");
  const slider = el("input", {
    type: "range",
    min: 0,
    max: 99,
    value: 0,
    "aria-label": "smoothing",
    oninput: () => {
      settings.smoothing = Number(slider.value) ? 0.5 + Number(slider.value) / 200 : 0;
      fill(value, settings.smoothing ? settings.smoothing.toFixed(2) : "off");
      settings.redraw();
    },
  });
  const log = el("input", { type: "checkbox", onchange: () => ((settings.log = log.checked), settings.redraw()) });
  const span = el(
    "select",
    { "aria-label": "part of the run", onchange: () => ((settings.last = Number(span.value)), settings.setZoom(null)) },
    [
      ["1", "whole run"],
      ["0.5", "last half"],
      ["0.1", "last tenth"],
    ].map(([value, words]) => el("option", { value }, words)),
  );
  const reset = el(
    "button",
    { type: "button", class: "quiet", hidden: true, onclick: () => settings.setZoom(null) },
    "reset zoom",
  );
  settings.onzoom = () => (reset.hidden = settings.zoomed === null);
  return el(
    "div",
    { class: "settings", role: "group", "aria-label": "all charts" },
    el("div", { class: "switch", role: "group", "aria-label": "axis" }, axes),
    el("label", { class: "slide" }, "smoothing", slider, value),
    el("label", {}, log, "log scale"),
    span,
    reset,
    el("span", { class: "hint" }, "drag across a chart to zoom"),
  );
}
