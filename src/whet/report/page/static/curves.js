// Converts the tracks of a report to series that a chart can draw.

const PERIODS = ["throttle", "pressure"];
export const AXES = { step: "step", samples: "samples", seconds: "time" };

/** Returns the x positions of a track on an axis, or null where they are unknown. */
export function placesOf(track, axis) {
  return track[axis];
}

/** Returns the curve of a track by name, or null. */
export function lineOf(track, name) {
  return track?.lines.find((line) => line.name === name) ?? null;
}

export function trackOf(report, source) {
  return report.tracks.find((track) => track.source === source) ?? null;
}

/** Returns a series for a chart. Points with an unknown x position are omitted, and x never decreases. */
export function seriesOf(track, line, axis, more = {}) {
  const places = placesOf(track, axis);
  const xs = [],
    ys = [],
    low = [],
    high = [];
  for (let i = 0; i < places.length; i++) {
    const x = places[i];
    // NaN leaves a gap in the curve, but the curve continues across points without a value.
    if (line.mean[i] === null && !line.nonfinite) continue;
    if (x === null || (xs.length && x < xs[xs.length - 1])) continue;
    if (xs.length && x === xs[xs.length - 1]) {
      if (line.mean[i] !== null) [ys[ys.length - 1], low[low.length - 1], high[high.length - 1]] = at(line, i);
      continue;
    }
    const [mean, least, most] = at(line, i);
    (xs.push(x), ys.push(mean), low.push(least), high.push(most));
  }
  const sparse = (track.source === "eval" || track.source === "epoch") && xs.length <= 40;
  return {
    xs,
    ys,
    low: line.low ? low : null,
    high: line.high ? high : null,
    unit: line.unit,
    nonfinite: line.nonfinite,
    sparse,
    ...more,
  };
}

function at(line, place) {
  const mean = line.mean[place];
  return [mean, line.low ? line.low[place] : mean, line.high ? line.high[place] : mean];
}

/** Returns an exponential moving average of the values, with bias correction. */
export function smoothed(ys, weight) {
  let mean = 0,
    norm = 0;
  return ys.map((y) => {
    if (y === null) return null;
    mean = weight * mean + (1 - weight) * y;
    norm = weight * norm + (1 - weight);
    return mean / norm;
  });
}

/** Returns the median of the values around each point, which is robust against single slow steps. */
export function rollingMedian(ys) {
  const reach = Math.max(2, Math.round(ys.length / 40));
  return ys.map((y, place) => {
    if (y === null) return null;
    const near = ys.slice(Math.max(0, place - reach), place + reach + 1).filter((value) => value !== null);
    near.sort((a, b) => a - b);
    return (near[(near.length - 1) >> 1] + near[near.length >> 1]) / 2;
  });
}

/** Returns the position of a step on an axis, interpolated between logged steps, or null. */
export function placeOfStep(report, step, axis) {
  if (axis === "step") return step;
  const track = trackOf(report, "step");
  if (!track || !track.step.length) return null;
  const places = placesOf(track, axis);
  let left = 0,
    right = track.step.length - 1;
  while (left < right) {
    const middle = (left + right) >> 1;
    if (track.step[middle] < step) left = middle + 1;
    else right = middle;
  }
  if (left === 0 || track.step[left] <= step) return places[left];
  const share = (step - track.step[left - 1]) / (track.step[left] - track.step[left - 1]);
  return places[left - 1] === null ? null : places[left - 1] + share * (places[left] - places[left - 1]);
}

/** Returns the slow periods of a run as bands of a chart. */
export function bandsOf(report, axis) {
  return report.slow_periods
    .map((period) => ({
      cause: period.cause,
      level: period.level,
      from: axis === "seconds" ? period.from_seconds : placeOfStep(report, period.from_step, axis),
      to: axis === "seconds" ? period.to_seconds : placeOfStep(report, period.to_step, axis),
    }))
    .filter((band) => band.from !== null && band.to !== null);
}

/** Returns the events that are drawn as vertical lines. Heat and memory pressure are excluded, because they are drawn
 * as bands if they slowed down the steps. */
export function marksOf(report, axis) {
  return report.timeline
    .filter(({ kind, tone }) => kind === "resume" || (["bad", "warn"].includes(tone) && !PERIODS.includes(kind)))
    .map((entry) => ({
      tone: entry.tone,
      label: entry.label,
      at: axis === "seconds" ? entry.seconds : placeOfStep(report, entry.step, axis),
    }))
    .filter((mark) => mark.at !== null);
}
