// One chart: curves by step, samples or time, drawn by uPlot on a canvas, and a table of their values.
import { disclosure, el, fill, pill, table } from "./dom.js";
import { formatUnit, shortNumber, formatCount, formatSeconds } from "./format.js";
import { AXES } from "./curves.js";
import { drawnLayer, layersOf, nearest } from "./layers.js";
import { colors, dot, drawBehind, drawMarkLabels, faint, pointMark } from "./paint.js";

const MOST_ROWS = 200;
const BYTE_STEPS = Array.from({ length: 44 }, (none, power) => 2 ** power);

export class Chart {
  /** Creates a chart. All charts of a page share `settings`: axis, smoothing, log scale and zoom. */
  constructor(settings, { id, title, caption, height = 220, logs = false, floor = null, isNamed = false }) {
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
    this.caption = el("p", { class: "caption" }, caption);
    this.legend = el("div", { class: "legend" });
    this.tip = el("div", { class: "tip", "aria-hidden": "true" });
    this.labels = el("div", { class: "mark-labels", "aria-hidden": "true" });
    this.element = el(
      "figure",
      { class: "chart", id },
      el(
        "figcaption",
        {},
        el("div", { class: "chart-head" }, el("h3", {}, title), this.now),
        this.caption,
      ),
      this.legend,
      this.box,
      disclosure("as a table", () => this.table(), { class: "data" }),
    );
    this.watcher = new ResizeObserver(() => this.resize());
    this.watcher.observe(this.box);
    settings.charts.add(this);
  }

  /** Shows series of the form {label, color, xs, ys, low, high, unit, dashed}. */
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
    this.describe();
    const width = this.box.clientWidth;
    if (!width) return;
    const { data, lines, pairs } = layersOf(this.series, { smoothing: this.settings.smoothing, isLog: this.isLog });
    const shape = JSON.stringify([
      lines.map((line) => [line.label, line.role, line.color, line.dashed, line.points]),
      this.isLog,
      this.settings.axis,
      pairs,
      this.settings.theme,
    ]);
    if (this.plot && shape === this.shape) {
      this.plot.setData(data, false);
      this.zoom();
      return;
    }
    this.shape = shape;
    this.plot?.destroy();
    fill(this.box);
    this.plot = new uPlot(this.options(lines, pairs, width), data, this.box);
    this.plot.over.append(this.labels, this.tip);
    this.zoom();
  }

  options(lines, pairs, width) {
    const color = colors();
    const axis = {
      stroke: color("muted"),
      font: `11px ${color("font")}`,
      ticks: { show: false },
      gap: 6,
      grid: { stroke: color("line"), width: 1 },
    };
    const unit = this.series[0].unit;
    return {
      width,
      height: this.height,
      legend: { show: false },
      padding: [10, 12, 0, 0],
      scales: {
        x: { time: false },
        y: this.isLog ? { distr: 3 } : { range: (plot, low, high) => this.range(low, high) },
      },
      axes: [
        {
          ...axis,
          grid: { show: false },
          values: (plot, ticks) => ticks.map((tick) => this.formatX(tick)),
          space: 70,
          size: 30,
        },
        {
          ...axis,
          values: (plot, ticks) => ticks.map((tick) => shortNumber(tick, unit)),
          size: 56,
          space: 36,
          ...(unit === "bytes" && !this.isLog ? { incrs: BYTE_STEPS } : {}),
        },
      ],
      series: [{}, ...lines.map((line) => drawnLayer(line, color, this.hidden.has(line.label)))],
      bands: pairs.map(([high, low, name]) => ({ series: [high, low], fill: faint(color(name), 0.16) })),
      cursor: {
        drag: { x: true, y: false, setScale: false },
        points: {
          size: 7,
          show: (plot, place) =>
            lines[place - 1]?.role === "main" ? pointMark(color(lines[place - 1].color)) : false,
        },
        dataIdx: (plot, place, found) => nearest(plot.data[place], found),
        sync: { key: this.settings.key },
        focus: { prox: -1 },
        bind: { dblclick: () => () => this.settings.setZoom(null) },
      },
      hooks: {
        drawClear: [(plot) => drawBehind(plot, this, color)],
        draw: [(plot) => drawMarkLabels(plot, this)],
        setCursor: [(plot) => this.point(plot, lines)],
        setSelect: [(plot) => this.select(plot)],
      },
    };
  }

  range(low, high) {
    if (low === null || high === null) return [0, 1];
    if (this.floor !== null) low = Math.min(low, this.floor);
    const room = (high - low || Math.abs(high) || 1) * 0.06;
    return [low === this.floor ? low : low - room, high + room];
  }

  /** Shows the values of the curves at the pointer in a tooltip. */
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
      return [
        el(
          "div",
          { class: "tip-row" },
          dot(line.color),
          el("span", {}, line.label),
          el("b", {}, formatUnit(value, line.unit)),
        ),
      ];
    });
    const x = plot.data[0][idx];
    const around = this.bands
      .filter((band) => band.from <= x && x <= band.to)
      .map((band) =>
        el(
          "div",
          { class: "tip-row" },
          dot(band.cause === "pressure" ? "pressure" : "heat"),
          el("span", {}, band.cause),
          el("b", {}, band.level),
        ),
      );
    fill(
      this.tip,
      el("div", { class: "tip-place" }, `${AXES[this.settings.axis]} ${this.formatX(x, true)}`),
      rows,
      around,
    );
    const isRight = left > plot.over.clientWidth / 2;
    this.tip.style.setProperty("left", isRight ? "auto" : `${left + 14}px`);
    this.tip.style.setProperty("right", isRight ? `${plot.over.clientWidth - left + 14}px` : "auto");
  }

  select(plot) {
    const { left, width } = plot.select;
    if (width > 4) this.settings.setZoom([plot.posToVal(left, "x"), plot.posToVal(left + width, "x")]);
    plot.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
  }

  /** Applies the shared zoom. */
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

  formatX(place, isExact = false) {
    if (this.settings.axis === "seconds") return formatSeconds(place);
    if (isExact) return Math.round(place).toLocaleString("en-GB");
    return shortNumber(place, "");
  }

  /** Updates the legend, the newest value, and the description for screen readers. */
  describe() {
    const ends = this.series.map((one) => ({ ...one, last: one.newest ?? lastOf(one.ys), first: one.ys.find((y) => y !== null) }));
    const broken = ends.reduce((sum, one) => sum + (one.nonfinite ?? 0), 0);
    fill(
      this.now,
      broken ? pill(`${formatCount(broken)} NaN or infinite`, "bad") : "",
      ends.length === 1 && !this.isNamed ? ` ${formatUnit(ends[0].last, ends[0].unit)}` : "",
    );
    const chips = ends.map((one) =>
      el(
        "button",
        {
          type: "button",
          class: "chip",
          "aria-pressed": String(!this.hidden.has(one.label)),
          onclick: () => this.toggle(one.label),
        },
        dot(one.color, one.dashed),
        el("span", {}, one.label),
        el("b", {}, formatUnit(one.last, one.unit)),
      ),
    );
    fill(this.legend, ends.length > 1 || this.isNamed ? chips : []);
    const ranges = ends
      .slice(0, 6)
      .map((one) => `${one.label} from ${formatUnit(one.first ?? null, one.unit)} to ${formatUnit(one.last, one.unit)}`);
    this.box.setAttribute(
      "aria-label",
      `${this.title} by ${AXES[this.settings.axis]}: ${ranges.join("; ")}. The table below has the values.`,
    );
  }

  toggle(label) {
    if (!this.hidden.delete(label)) this.hidden.add(label);
    this.shape = "";
    this.draw();
  }

  table() {
    const rows = this.series.flatMap((one) => {
      const stride = Math.max(1, Math.ceil((one.xs.length * this.series.length) / MOST_ROWS));
      return one.xs
        .map((x, place) => [x, place])
        .filter(([, place]) => place % stride === 0 || place === one.xs.length - 1)
        .map(([x, place]) => [
          this.formatX(x, true),
          one.label,
          formatUnit(one.ys[place], one.unit),
          one.low ? `${formatUnit(one.low[place], one.unit)} to ${formatUnit(one.high[place], one.unit)}` : "–",
        ]);
    });
    return el("div", { class: "scroll" }, table([AXES[this.settings.axis], "curve", "value", "range"], rows));
  }
}

function lastOf(ys) {
  for (let place = ys.length - 1; place >= 0; place--) if (ys[place] !== null) return ys[place];
  return null;
}
