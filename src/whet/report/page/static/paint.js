// With which colours and marks is the page painted?
import { el } from "./dom.js";

/** The colours of the page as they are now. */
export function colours() {
  const style = getComputedStyle(document.documentElement);
  return (name) => style.getPropertyValue(`--${name}`).trim();
}

/** The colour of the nth curve of a chart. */
export function seriesColour(place) {
  return `series-${1 + (place % 8)}`;
}

/** Stretches and moments, behind the curves. */
export function drawBehind(plot, { bands, marks }, colour) {
  const { ctx } = plot;
  const { left, top, width, height } = plot.bbox;
  ctx.save();
  ctx.beginPath();
  ctx.rect(left, top, width, height);
  ctx.clip();
  for (const band of bands) {
    const from = plot.valToPos(band.from, "x", true),
      to = plot.valToPos(band.to, "x", true);
    ctx.fillStyle = faint(colour(band.about === "pressure" ? "pressure" : "heat"), 0.13);
    ctx.fillRect(from, top, Math.max(2, to - from), height);
  }
  ctx.setLineDash([3, 4]);
  ctx.lineWidth = devicePixelRatio;
  for (const mark of marks) {
    const x = Math.round(plot.valToPos(mark.at, "x", true)) + 0.5;
    ctx.strokeStyle = colour(mark.tone === "bad" ? "bad" : mark.tone === "warn" ? "warn" : "muted");
    ctx.beginPath();
    ctx.moveTo(x, top);
    ctx.lineTo(x, top + height);
    ctx.stroke();
  }
  ctx.restore();
}

/** The mark of a curve beside its name. */
export function dot(colour, isDashed = false) {
  return el("i", { class: isDashed ? "dot dashed" : "dot", style: { "--dot": `var(--${colour})` } });
}

/** The mark on a curve where the pointer is. */
export function pointMark(colour) {
  return el("div", { class: "u-cursor-pt", style: { background: colour } });
}

/** A colour that lets through what is behind it. */
export function faint(colour, share) {
  return `color-mix(in srgb, ${colour} ${100 * share}%, transparent)`;
}
