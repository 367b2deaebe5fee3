// One chart: curves over steps, samples or time, with what lies behind them as a table. Drawn by uPlot on a canvas.
import { disclosure, el, fill, pill, table } from "./dom.js";
import { inUnit, showCount, showNumber, showSeconds } from "./words.js";
import { AXES, smoothed } from "./curves.js";

const MOST_ROWS = 200;

/** The colours of the page as they are now. */
export function colours() {
  const style = getComputedStyle(document.documentElement);
  return (name) => style.getPropertyValue(`--${name}`).trim();
}

/** The colour of the nth curve of a chart. */
export function seriesColour(place) {
  return `series-${1 + (place % 8)}`;
}

export class Chart {
  /** `settings` is what all charts of a page share: axis, smoothing, log scale and zoom. */
  constructor(settings, { id, title, says, height = 220, logs = false, floor = null, isNamed = false }) {
    this.settings = settings;
    this.title = title;
    this.height = height;
    this.canLog = logs;
    this.floor = floor;
    this.isNamed = isNamed;
    this.hidden = new Set();
    this.series = [];
    this.bands = [];
    this.marks = [];
    this.plot = null;
    this.shape = "";
    this.box = el("div", { class: "plot", role: "img" });
    this.now = el("div", { class: "now" });
    this.legend = el("div", { class: "legend" });
    this.tip = el("div", { class: "tip", "aria-hidden": "true" });
    this.element = el(
      "figure",
      { class: "chart", id },
      el("figcaption", {}, el("div", { class: "chart-head" }, el("h3", {}, title), this.now), el("p", { class: "says" }, says)),
      this.legend,
      this.box,
      disclosure("as a table", () => this.table(), { class: "data" })
    );
    this.watcher = new ResizeObserver(() => this.resize());
    this.watcher.observe(this.box);
    settings.charts.add(this);
  }

  /** Shows these series: {label, colour, xs, ys, low, high, unit, dashed}. */
  show(series, { bands = [], marks = [] } = {}) {
    this.series = series.filter((one) => one.xs.length);
    this.bands = bands;
    this.marks = marks;
    this.element.hidden = !this.series.length;
    this.draw();
  }

  close() {
    this.watcher.disconnect();
    this.plot?.destroy();
    this.settings.charts.delete(this);
  }

  get isLog() {
    if (!this.canLog || !this.settings.log) return false;
    return this.series.some((one) => one.ys.some((y) => y !== null && y > 0));
  }

  draw() {
    if (!this.series.length) return;
    this.say();
    const width = this.box.clientWidth;
    if (!width) return;
    const { data, lines } = this.columns();
    const shape = JSON.stringify([lines.map((line) => [line.label, line.role, line.colour, line.dashed, line.points]),
      this.isLog, this.settings.axis, this.bandPairs, this.settings.theme]);
    if (this.plot && shape === this.shape) {
      this.plot.setData(data, false);
      this.zoom();
      return;
    }
    this.shape = shape;
    this.plot?.destroy();
    fill(this.box);
    this.plot = new uPlot(this.options(lines, width), data, this.box);
    this.plot.over.append(this.tip);
    this.zoom();
  }

  /** All series on one axis, and how each is drawn: the values, their range, and the values without noise. */
  columns() {
    const positive = (ys) => (this.isLog ? ys.map((y) => (y !== null && y > 0 ? y : null)) : ys);
    const tables = [], lines = [];
    this.bandPairs = [];
    this.series.forEach((one, place) => {
      const isSmooth = this.settings.smoothing > 0 && one.ys.length > 8 && !one.steady;
      const common = { label: one.label, colour: one.colour, unit: one.unit, dashed: one.dashed, owner: place };
      const columns = [one.xs];
      if (one.low && one.high && !isSmooth) {
        columns.push(positive(one.high), positive(one.low));
        this.bandPairs.push([lines.length + 1, lines.length + 2, one.colour]);
        lines.push({ ...common, role: "high" }, { ...common, role: "low" });
      }
      if (isSmooth) {
        columns.push(positive(one.ys));
        lines.push({ ...common, role: "raw" });
      }
      const weight = this.settings.smoothing;
      columns.push(positive(isSmooth ? smoothed(one.ys, weight) : one.ys));
      lines.push({ ...common, role: "main", points: one.sparse });
      tables.push(columns);
    });
    return { data: tables.length === 1 ? tables[0] : uPlot.join(tables), lines };
  }

  options(lines, width) {
    const colour = colours();
    const axis = {
      stroke: colour("muted"), font: `11px ${colour("font")}`, ticks: { show: false }, gap: 6,
      grid: { stroke: colour("line"), width: 1 },
    };
    const unit = this.series[0].unit;
    return {
      width, height: this.height, legend: { show: false }, padding: [10, 12, 0, 0],
      scales: {
        x: { time: false },
        y: this.isLog ? { distr: 3 } : { range: (plot, low, high) => this.range(low, high) },
      },
      axes: [
        { ...axis, grid: { show: false }, values: (plot, ticks) => ticks.map((tick) => this.sayPlace(tick)), space: 70, size: 30 },
        { ...axis, values: (plot, ticks) => ticks.map((tick) => shortly(tick, unit)), size: 56, space: 36,
          ...(unit === "bytes" && !this.isLog ? { incrs: BYTE_STEPS } : {}) },
      ],
      series: [{}, ...lines.map((line) => this.drawn(line, colour))],
      bands: this.bandPairs.map(([high, low, name]) => ({ series: [high, low], fill: faint(colour(name), 0.16) })),
      cursor: {
        drag: { x: true, y: false, setScale: false },
        points: { size: 7, show: (plot, place) => (lines[place - 1]?.role === "main" ? point(colour(lines[place - 1].colour)) : false) },
        dataIdx: (plot, place, found) => nearest(plot.data[place], found),
        sync: { key: this.settings.key },
        focus: { prox: -1 },
        bind: { dblclick: () => () => this.settings.setZoom(null) },
      },
      hooks: {
        drawClear: [(plot) => this.drawBehind(plot, colour)],
        setCursor: [(plot) => this.point(plot, lines)],
        setSelect: [(plot) => this.select(plot)],
      },
    };
  }

  drawn(line, colour) {
    const stroke = colour(line.colour);
    const hidden = this.hidden.has(line.label);
    if (line.role === "high" || line.role === "low") return { show: !hidden, stroke: "transparent", width: 0, points: { show: false } };
    if (line.role === "raw") return { show: !hidden, stroke: faint(stroke, 0.28), width: 1, points: { show: false } };
    return {
      show: !hidden, stroke, width: 2, dash: line.dashed ? [5, 5] : undefined,
      points: { show: Boolean(line.points), size: 5, fill: stroke, stroke },
    };
  }

  range(low, high) {
    if (low === null || high === null) return [0, 1];
    if (this.floor !== null) low = Math.min(low, this.floor);
    const room = (high - low || Math.abs(high) || 1) * 0.06;
    return [low === this.floor ? low : low - room, high + room];
  }

  /** Stretches and moments, behind the curves. */
  drawBehind(plot, colour) {
    const { ctx } = plot;
    const { left, top, width, height } = plot.bbox;
    ctx.save();
    ctx.beginPath();
    ctx.rect(left, top, width, height);
    ctx.clip();
    for (const band of this.bands) {
      const from = plot.valToPos(band.from, "x", true), to = plot.valToPos(band.to, "x", true);
      ctx.fillStyle = faint(colour(band.about === "pressure" ? "pressure" : "heat"), 0.13);
      ctx.fillRect(from, top, Math.max(2, to - from), height);
    }
    ctx.setLineDash([3, 4]);
    ctx.lineWidth = devicePixelRatio;
    for (const mark of this.marks) {
      const x = Math.round(plot.valToPos(mark.at, "x", true)) + 0.5;
      ctx.strokeStyle = colour(mark.tone === "bad" ? "bad" : mark.tone === "warn" ? "warn" : "muted");
      ctx.beginPath();
      ctx.moveTo(x, top);
      ctx.lineTo(x, top + height);
      ctx.stroke();
    }
    ctx.restore();
  }

  /** What the curves say where the pointer is. */
  point(plot, lines) {
    const { left, idx } = plot.cursor;
    const isHere = idx !== null && idx !== undefined && left >= 0;
    this.tip.classList.toggle("seen", isHere);
    if (!isHere) return;
    const rows = lines.flatMap((line, place) => {
      const at = plot.cursor.idxs?.[place + 1];
      if (line.role !== "main" || this.hidden.has(line.label) || at === null || at === undefined) return [];
      const value = plot.data[place + 1][at];
      if (value === null || value === undefined) return [];
      return [el("div", { class: "tip-row" }, dot(line.colour), el("span", {}, line.label), el("b", {}, inUnit(value, line.unit)))];
    });
    const x = plot.data[0][idx];
    const around = this.bands.filter((band) => band.from <= x && x <= band.to).map((band) => el("div", { class: "tip-row" }, dot(band.about === "pressure" ? "pressure" : "heat"), el("span", {}, band.about), el("b", {}, band.level)));
    fill(this.tip, el("div", { class: "tip-place" }, `${AXES[this.settings.axis]} ${this.sayPlace(x, true)}`), rows, around);
    const isRight = left > plot.over.clientWidth / 2;
    this.tip.style.setProperty("left", isRight ? "auto" : `${left + 14}px`);
    this.tip.style.setProperty("right", isRight ? `${plot.over.clientWidth - left + 14}px` : "auto");
  }

  select(plot) {
    const { left, width } = plot.select;
    if (width > 4) this.settings.setZoom([plot.posToVal(left, "x"), plot.posToVal(left + width, "x")]);
    plot.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
  }

  /** The part of the axis that all charts show. */
  zoom() {
    const data = this.plot.data[0];
    let [min, max] = this.settings.zoomOver(this.extent ?? [data[0], data[data.length - 1]]);
    if (min === max) [min, max] = [min - 1, max + 1];
    this.plot.batch(() => this.plot.setScale("x", { min, max }));
  }

  resize() {
    if (!this.plot) this.draw();
    else if (this.box.clientWidth && this.box.clientWidth !== this.plot.width) {
      this.plot.setSize({ width: this.box.clientWidth, height: this.height });
    }
  }

  sayPlace(place, isExact = false) {
    if (this.settings.axis === "seconds") return showSeconds(place);
    if (isExact) return Math.round(place).toLocaleString("en-GB");
    return shortly(place, "");
  }

  /** Names, newest values and a description for those who cannot see the picture. */
  say() {
    const ends = this.series.map((one) => ({ ...one, last: lastOf(one.ys), first: one.ys.find((y) => y !== null) }));
    const broken = ends.reduce((sum, one) => sum + (one.nonfinite ?? 0), 0);
    fill(this.now, broken ? pill(`${showCount(broken)} NaN or infinite`, "bad") : "", ends.length === 1 && !this.isNamed ? ` ${inUnit(ends[0].last, ends[0].unit)}` : "");
    const chips = ends.map((one) =>
      el("button", { type: "button", class: "chip", "aria-pressed": String(!this.hidden.has(one.label)), onclick: () => this.toggle(one.label) },
        dot(one.colour, one.dashed), el("span", {}, one.label), el("b", {}, inUnit(one.last, one.unit))));
    fill(this.legend, ends.length > 1 || this.isNamed ? chips : []);
    const told = ends.slice(0, 6).map((one) => `${one.label} from ${inUnit(one.first ?? null, one.unit)} to ${inUnit(one.last, one.unit)}`);
    this.box.setAttribute("aria-label", `${this.title} by ${AXES[this.settings.axis]}: ${told.join("; ")}. The table below has the numbers.`);
  }

  toggle(label) {
    if (!this.hidden.delete(label)) this.hidden.add(label);
    this.shape = "";
    this.draw();
  }

  table() {
    const rows = this.series.flatMap((one) => {
      const stride = Math.max(1, Math.ceil((one.xs.length * this.series.length) / MOST_ROWS));
      return one.xs.map((x, place) => [x, place]).filter(([, place]) => place % stride === 0 || place === one.xs.length - 1)
        .map(([x, place]) => [this.sayPlace(x, true), one.label, inUnit(one.ys[place], one.unit),
          one.low ? `${inUnit(one.low[place], one.unit)} to ${inUnit(one.high[place], one.unit)}` : "–"]);
    });
    return el("div", { class: "scroll" }, table([AXES[this.settings.axis], "curve", "value", "range"], rows));
  }
}

const BYTE_STEPS = Array.from({ length: 44 }, (none, power) => 2 ** power);

function shortly(tick, unit) {
  if (tick === null || tick === undefined) return "";
  if (unit === "bytes") {
    for (const [name, size] of [["TB", 2 ** 40], ["GB", 2 ** 30], ["MB", 2 ** 20], ["kB", 2 ** 10]]) {
      if (Math.abs(tick) >= size) return `${Number((tick / size).toPrecision(3))} ${name}`;
    }
    return showNumber(tick);
  }
  if (unit === "percent") return `${showNumber(tick)} %`;
  if (unit === "seconds") return showSeconds(tick);
  if (Math.abs(tick) >= 1e6) return showCount(tick).replace(".0 ", " ");
  return showNumber(tick);
}

function lastOf(ys) {
  for (let place = ys.length - 1; place >= 0; place--) if (ys[place] !== null) return ys[place];
  return null;
}

/** The place of a value next to where the pointer is: curves that were joined have holes. */
function nearest(column, found) {
  for (let off = 0; off < 60; off++) {
    for (const place of [found - off, found + off]) {
      if (column[place] !== null && column[place] !== undefined) return place;
    }
  }
  return null;
}

export function dot(colour, isDashed = false) {
  return el("i", { class: isDashed ? "dot dashed" : "dot", style: { "--dot": `var(--${colour})` } });
}

function point(colour) {
  return el("div", { class: "u-cursor-pt", style: { background: colour } });
}

function faint(colour, share) {
  return `color-mix(in srgb, ${colour} ${100 * share}%, transparent)`;
}
