// Numbers for people. An unknown quantity is a dash, never zero.

export const DASH = "–";

const known = (value) => typeof value === "number" && Number.isFinite(value);

export function count(value) {
  if (!known(value)) return DASH;
  for (const [unit, suffix] of [[1e12, "T"], [1e9, "B"], [1e6, "M"], [1e3, "k"]]) {
    if (Math.abs(value) >= unit * (unit > 1e3 ? 1 : 10)) return trimmed(value / unit) + suffix;
  }
  return whole(value);
}

const trimmed = (value) => value.toFixed(Math.abs(value) < 10 ? 2 : 1);

export function whole(value) {
  return known(value) ? Math.round(value).toLocaleString("en-US") : DASH;
}

// step: the distance between the labels of an axis, which then all differ.
export function bytes(value, step = 0) {
  if (!known(value)) return DASH;
  for (const [unit, suffix] of [[2 ** 40, "TiB"], [2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"]]) {
    if (Math.abs(value) < unit) continue;
    const digits = step > 0 && step < unit ? Math.ceil(Math.log10(unit / step)) : 0;
    return `${(value / unit).toFixed(Math.max(digits, value / unit >= 100 ? 0 : 1))} ${suffix}`;
  }
  return `${whole(value)} B`;
}

export function duration(seconds) {
  if (!known(seconds)) return DASH;
  if (seconds !== 0 && Math.abs(seconds) < 1) return `${Number((seconds * 1000).toPrecision(2))} ms`;
  if (seconds < 10) return `${seconds.toFixed(1)} s`;
  const s = Math.round(seconds);
  if (s < 60) return `${s} s`;
  if (s < 3600) return `${Math.floor(s / 60)}m ${String(s % 60).padStart(2, "0")}s`;
  if (s < 86400) return `${Math.floor(s / 3600)}h ${String(Math.floor((s % 3600) / 60)).padStart(2, "0")}m`;
  return `${Math.floor(s / 86400)}d ${Math.floor((s % 86400) / 3600)}h`;
}

export function fixed(value, digits = 3) {
  return known(value) ? value.toFixed(digits) : DASH;
}

export function percent(value, digits = 1) {
  return known(value) ? `${(value * 100).toFixed(digits)}%` : DASH;
}

export function short(value) {
  if (!known(value)) return DASH;
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size >= 1e4) return count(value);
  if (size < 1e-3) return value.toExponential(1);
  return String(Number(value.toPrecision(4)));
}

// A value in the unit of its metric.
export function inUnit(value, unit) {
  if (unit === "bytes") return bytes(value);
  if (unit === "s") return duration(value);
  if (unit === "fraction") return percent(value);
  return short(value);
}

export function ago(secondsSinceEpoch) {
  if (!known(secondsSinceEpoch)) return DASH;
  const seconds = Date.now() / 1000 - secondsSinceEpoch;
  return seconds < 5 ? "now" : `${duration(Math.max(0, seconds))} ago`;
}

export function clock(isoTime) {
  if (!isoTime) return DASH;
  const time = new Date(isoTime);
  if (Number.isNaN(time.getTime())) return DASH;
  return time.toLocaleString("sv-SE");
}

export function baseName(uri) {
  return uri.split(/[\\/:]/).pop() || uri;
}
