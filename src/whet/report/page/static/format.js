// Formats numbers, durations and names for people.

const BYTES = [
  ["TB", 2 ** 40],
  ["GB", 2 ** 30],
  ["MB", 2 ** 20],
  ["kB", 2 ** 10],
];

export function formatBytes(bytes) {
  for (const [unit, size] of BYTES) {
    if (Math.abs(bytes) >= size) {
      const value = bytes / size;
      return `${value >= 100 ? value.toFixed(0) : value.toFixed(1).replace(/\.0$/, "")} ${unit}`;
    }
  }
  return `${bytes.toFixed(0)} B`;
}

export function formatSeconds(seconds) {
  if (seconds === 0) return "0 s";
  if (seconds < 0.001) return `${Number((seconds * 1e6).toPrecision(2))} µs`;
  if (seconds < 0.95) return `${Number((seconds * 1000).toPrecision(seconds < 0.01 ? 2 : 3))} ms`;
  if (seconds < 10) return `${seconds.toFixed(1)} s`;
  if (seconds < 120) return `${seconds.toFixed(0)} s`;
  const minutes = Math.round(seconds / 60);
  if (minutes < 120) return `${minutes} min`;
  const hours = Math.floor(minutes / 60);
  if (hours >= 48) return `${(hours / 24).toFixed(1)} days`;
  return minutes % 60 ? `${hours} h ${minutes % 60} min` : `${hours} h`;
}

export function formatCount(count) {
  if (Math.abs(count) >= 1e9) return `${(count / 1e9).toFixed(1)} B`;
  if (Math.abs(count) >= 1e6) return `${(count / 1e6).toFixed(1)} M`;
  return Math.round(count).toLocaleString("en-GB");
}

/** Formats a number with about four significant digits. NaN and infinity become words. */
export function formatNumber(value) {
  if (value === null || value === undefined) return "–";
  if (!Number.isFinite(value)) return String(value);
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e6 || size < 1e-4) return value.toExponential(2).replace("e+", "e");
  if (size >= 1000) return Math.round(value).toLocaleString("en-GB");
  return String(Number(value.toPrecision(4)));
}

export function formatPercent(share) {
  const percent = 100 * share;
  if (percent > 0 && percent < 0.1) return "< 0.1 %";
  return `${percent < 10 ? percent.toFixed(1) : percent.toFixed(0)} %`;
}

export function formatValue(value) {
  if (value === null || value === undefined) return "none";
  if (typeof value === "boolean") return value ? "on" : "off";
  if (typeof value === "number") return formatNumber(value);
  return typeof value === "object" ? JSON.stringify(value) : String(value);
}

/** Formats the value of a curve with its unit. */
export function formatUnit(value, unit) {
  if (value === null || value === undefined) return "–";
  if (unit === "bytes") return formatBytes(value);
  if (unit === "seconds") return formatSeconds(value);
  if (unit === "percent") return `${value.toFixed(value < 10 ? 1 : 0)} %`;
  if (unit === "samples/s") return `${formatNumber(Number(value.toPrecision(4)))} samples/s`;
  if (unit === "steps") return formatCount(value);
  return formatNumber(value);
}

export function formatDate(unixSeconds) {
  return new Date(unixSeconds * 1000).toLocaleString("en-GB", { dateStyle: "medium", timeStyle: "short" });
}

/** Returns a readable name for the kind of an event. Slow steps may have other causes than throttling. */
export function eventName(kind, tone) {
  if (kind !== "throttle") return kind;
  return tone === "good" ? "recovered" : "slower";
}

/** Returns a readable name for a field, such as "gradient norm" for "grad_norm". */
export function displayName(name) {
  const known = {
    lr: "learning rate",
    grad_norm: "gradient norm",
    samples_per_second: "speed",
    loss: "loss",
    "memory/allocated": "tensors",
    "memory/reserved": "reserved by the driver",
    "memory/peak": "peak",
    "memory/limit": "limit",
    "memory/process": "this process",
    "memory/used": "whole machine",
    "memory/available": "available",
    "memory/swap": "swap",
    "utilization/cpu": "all cores",
    "utilization/process": "this process",
    "utilization/gpu": "GPU",
  };
  return Object.hasOwn(known, name) ? known[name] : name.replaceAll("_", " ");
}

/** Returns a sentence that says which values are better, for the mode "min" or "max", or "" for an unknown mode. */
export function betterText(mode) {
  return mode === "min" ? "Lower is better." : mode === "max" ? "Higher is better." : "";
}

/** Formats a number for the labels of an axis, as short as possible. */
export function shortNumber(tick, unit) {
  if (tick === null || tick === undefined) return "";
  if (unit === "bytes") {
    for (const [name, size] of BYTES) {
      if (Math.abs(tick) >= size) return `${Number((tick / size).toPrecision(3))} ${name}`;
    }
    return formatNumber(tick);
  }
  if (unit === "percent") return `${formatNumber(tick)} %`;
  if (unit === "seconds") return formatSeconds(tick);
  if (Math.abs(tick) >= 1e6) return formatCount(tick).replace(".0 ", " ");
  return formatNumber(tick);
}
