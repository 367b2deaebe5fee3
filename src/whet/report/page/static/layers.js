// The layers of a curve that uPlot draws: its values, their range, and smoothed values.
import { smoothed } from "./curves.js";
import { faint } from "./paint.js";

/** Returns {data, lines, pairs}: columns for uPlot, how each is drawn, and the pairs of columns that form a range. */
export function layersOf(series, { smoothing, isLog }) {
  const positive = (ys) => (isLog ? ys.map((y) => (y !== null && y > 0 ? y : null)) : ys);
  const tables = [];
  const lines = [];
  const pairs = [];

  series.forEach((one) => {
    const isSmooth = smoothing > 0 && one.ys.length > 8 && !one.steady;
    const common = { label: one.label, color: one.color, unit: one.unit, dashed: one.dashed };
    const columns = [one.xs];
    if (one.low && one.high && !isSmooth) {
      columns.push(positive(one.high), positive(one.low));
      pairs.push([lines.length + 1, lines.length + 2, one.color]);
      lines.push({ ...common, role: "high" }, { ...common, role: "low" });
    }
    if (isSmooth || one.raw) {
      columns.push(positive(one.raw ?? one.ys));
      lines.push({ ...common, role: "raw" });
    }

    columns.push(positive(isSmooth ? smoothed(one.ys, smoothing) : one.ys));
    lines.push({ ...common, role: "main", points: one.sparse });
    tables.push(columns);
  });
  return { data: tables.length === 1 ? tables[0] : uPlot.join(tables), lines, pairs };
}

/** Returns the uPlot options of a layer. */
export function drawnLayer(line, color, hidden) {
  const stroke = color(line.color);
  if (line.role === "high" || line.role === "low")
    return { show: !hidden, stroke: "transparent", width: 0, points: { show: false } };
  if (line.role === "raw") return { show: !hidden, stroke: faint(stroke, 0.28), width: 1, points: { show: false } };
  return {
    show: !hidden,
    stroke,
    width: 2,
    dash: line.dashed ? [5, 5] : undefined,
    points: { show: Boolean(line.points), size: 5, fill: stroke, stroke },
  };
}

/** Returns the index of the value nearest to an index, because columns of joined curves have gaps. */
export function nearest(column, found) {
  for (let off = 0; off < 60; off++) {
    for (const place of [found - off, found + off]) {
      if (column[place] !== null && column[place] !== undefined) return place;
    }
  }
  return null;
}
