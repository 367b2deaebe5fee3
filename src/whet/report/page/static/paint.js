// Colors and markers.
import { el } from "./dom.js";

/** Returns a function that looks up a color of the current theme by name. */
export function colors() {
  const style = getComputedStyle(document.documentElement);
  return (name) => style.getPropertyValue(`--${name}`).trim();
}

/** Returns the name of the color of the nth curve of a chart. */
export function seriesColor(place) {
  return `series-${1 + (place % 8)}`;
}

/** Draws slow periods and notable events behind the curves. */
export function drawBehind(plot, { bands, marks }, color) {
  const { ctx } = plot;
  const { left, top, width, height } = plot.bbox;
  ctx.save();
  ctx.beginPath();
  ctx.rect(left, top, width, height);
  ctx.clip();
  for (const band of bands) {
    const from = plot.valToPos(band.from, "x", true),
      to = plot.valToPos(band.to, "x", true);
    ctx.fillStyle = faint(color(band.cause === "pressure" ? "pressure" : "heat"), 0.13);
    ctx.fillRect(from, top, Math.max(2, to - from), height);
  }
  ctx.setLineDash([3, 4]);
  ctx.lineWidth = devicePixelRatio;
  for (const mark of marks) {
    const x = Math.round(plot.valToPos(mark.at, "x", true)) + 0.5;
    ctx.strokeStyle = color(mark.tone === "bad" ? "bad" : mark.tone === "warn" ? "warn" : "muted");
    ctx.beginPath();
    ctx.moveTo(x, top);
    ctx.lineTo(x, top + height);
    ctx.stroke();
  }
  ctx.restore();
}

const MOST_ROWS = 3;
const LABEL_GAP = 4;

/** Writes the label of each event next to its line, in up to three rows. A label without room is left out. */
export function drawMarkLabels(plot, { labels, marks }) {
  const width = plot.over.clientWidth;
  const inView = marks
    .map(({ label, tone, at }) => ({ label, tone, x: plot.valToPos(at, "x") }))
    .filter(({ label, x }) => label && x >= 0 && x <= width);
  const seen = inView.map(({ label, tone }) => el("span", { class: `mark-label ${tone}` }, label));
  labels.replaceChildren(...seen);
  const taken = Array.from({ length: MOST_ROWS }, () => []);
  const places = inView.map(({ x }, place) => {
    const long = seen[place].offsetWidth;
    const left = x + LABEL_GAP + long <= width ? x + LABEL_GAP : x - LABEL_GAP - long;
    const row = taken.findIndex((ends) => ends.every(([from, to]) => left + long < from || left > to));
    if (row >= 0) taken[row].push([left, left + long]);
    return { left, row };
  });
  places.forEach(({ left, row }, place) => {
    if (row < 0) seen[place].remove();
    else Object.assign(seen[place].style, { left: `${left}px`, top: `${row * 15}px` });
  });
}

/** Creates the colored dot next to the name of a curve. */
export function dot(color, isDashed = false) {
  return el("i", { class: isDashed ? "dot dashed" : "dot", style: { "--dot": `var(--${color})` } });
}

/** Creates the dot on a curve at the pointer. */
export function pointMark(color) {
  return el("div", { class: "u-cursor-pt", style: { background: color } });
}

/** Returns a color with the given opacity. */
export function faint(color, share) {
  return `color-mix(in srgb, ${color} ${100 * share}%, transparent)`;
}
