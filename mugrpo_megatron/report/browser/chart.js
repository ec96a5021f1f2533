"use strict";
// Numbers as text, scales with ticks, and paths: pure functions that know nothing of the page.

const within = (value, low, high) => Math.min(Math.max(value, low), high);
const color = (name) => `var(--${name})`;

function clock(seconds) {
  const s = Math.round(seconds), pad = (n) => String(n).padStart(2, "0");
  if (s < 60) return seconds === 0 ? "0" : `${seconds < 10 ? seconds.toFixed(1) : s} s`;
  const h = Math.floor(s / 3600), minutes = Math.floor(s / 60) - 60 * h;
  return `${h ? `${h}:${pad(minutes)}` : minutes}:${pad(s % 60)}`;
}

function number(value) {
  const size = Math.abs(value);
  const [unit, letter] = [[1e6, "M"], [1e4, "k"]].find(([least]) => size >= least) || [1, ""];
  if (size > 0 && size < 1e-3) return value.toExponential(1).replace(".0e", "e").replaceAll("-", "−");
  return `${+(value / (unit === 1e4 ? 1e3 : unit)).toPrecision(3)}${letter}`.replace("-", "−");
}

function text(value, format) {
  if (value === null || value === undefined) return "–";
  if (format === "percent") return `${+(100 * value).toPrecision(Math.abs(value) >= 0.0995 ? 3 : 2)} %`;
  return number(value);
}

/** Multiples of a round step between two ends, about `count` of them. */
function linearTicks(low, high, count, whole = false) {
  const raw = (high - low || 1) / count, power = 10 ** Math.floor(Math.log10(raw));
  const step = Math.max(power * [1, 2, 5, 10].find((m) => raw <= m * power * 1.0001), whole ? 1 : 0);
  const first = Math.ceil(low / step - 1e-9), last = Math.floor(high / step + 1e-9);
  return Array.from({ length: Math.max(last - first + 1, 0) }, (_, k) => +((first + k) * step).toPrecision(12));
}

function timeTicks(low, high, count) {
  const steps = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 43200, 86400];
  const step = steps.find((s) => (high - low) / s <= count);
  return step && high - low > 3 ? linearTicks(low / step, high / step, count, true).map((k) => k * step) : linearTicks(low, high, count);
}

function logTicks(low, high) {
  const from = Math.floor(Math.log10(low)), to = Math.ceil(Math.log10(high)), every = Math.ceil((to - from) / 6);
  const factors = to - from > 3 ? [1] : to - from > 1 ? [1, 3] : [1, 2, 5];
  const powers = Array.from({ length: to - from + 1 }, (_, k) => from + k).filter((p) => (p - from) % every === 0);
  return powers.flatMap((p) => factors.map((f) => f * 10 ** p)).filter((t) => t >= low * 0.999 && t <= high * 1.001);
}

/** The vertical axis that holds `values`: from value to pixel, and its ticks. */
function verticalScale(chart, values, top, bottom) {
  const log = chart.scale === "log";
  const shown = values.filter((v) => v !== null && v !== undefined && (!log || v > 0));
  const empty = !shown.length;
  if (empty) shown.push(log ? 0.1 : 0, 1);
  let low = Math.min(...shown), high = Math.max(...shown);
  if (chart.rule !== null && (log || Math.abs(chart.rule) <= 2 * high)) [low, high] = [Math.min(low, chart.rule), Math.max(high, chart.rule)];
  if (log) {
    if (high / low < 4) [low, high] = [low / 2, high * 2];
    [low, high] = [low * 0.9, high * 1.1];
    const foot = values.includes(0) ? 24 : 0; // with a foot, the axis is linear from the smallest value to 0
    const span = bottom - foot - top, part = (v) => Math.log(v / low) / Math.log(high / low);
    const to = (v) => v >= low ? bottom - foot - part(v) * span : foot ? bottom - (Math.max(v, 0) / low) * foot : v > 0 ? bottom : null;
    const ticks = [...(foot ? [0] : []), ...(foot && empty ? [] : logTicks(low, high))];
    return { to, low, high, ticks, labels: ticks.map((t) => text(t, chart.format)) };
  }
  if (chart.zero) low = Math.min(low, 0);
  const pad = high - low > 1e-12 * Math.abs(high) ? 0.04 * (high - low) : 0.1 * Math.abs(high) || 0.01;
  [low, high] = [low === 0 && chart.zero ? 0 : low - pad, high + pad];
  const ticks = linearTicks(low, high, 4, chart.format === "tokens"), unit = chart.format === "percent" ? 100 : 1;
  const digits = within(-Math.floor(Math.log10(unit * (ticks[1] - ticks[0]) || 1) + 1e-9), 0, 6);
  const plain = (t) => (unit * t).toFixed(digits).replace("-", "−") + (unit === 100 ? " %" : "");
  const large = Math.max(Math.abs(low), Math.abs(high)) >= 1e4 || digits > 3;
  return { to: (v) => bottom - ((v - low) / (high - low)) * (bottom - top), low, high, ticks, labels: ticks.map((t) => (large ? text(t, chart.format) : plain(t))) };
}

/** Consecutive points [x, y] that have a value; `starts` are indices at which a new piece begins anyway. */
function pieces(xs, ys, starts = new Set()) {
  const all = [[]];
  ys.forEach((y, i) => {
    if (y === null || y === undefined || starts.has(i)) all.push([]);
    if (y !== null && y !== undefined) all[all.length - 1].push([xs[i], y]);
  });
  return all.filter((piece) => piece.length);
}

const points = (piece) => piece.map(([x, y]) => `${x.toFixed(1)},${y.toFixed(1)}`);
const linePath = (parts) => parts.map((piece) => `M${points(piece).join("L")}`).join("");
const stepPath = (parts, end) => parts.map((piece) => `M${points(piece.flatMap(([x, y], i) => [[x, y], [i + 1 < piece.length ? piece[i + 1][0] : end, y]])).join("L")}`).join("");

function bandPath(xs, lows, highs) {
  const known = xs.map((x, i) => [x, lows[i], highs[i]]).filter(([, low, high]) => low !== null && high !== null);
  if (!known.length) return "";
  return `M${points([...known.map(([x, , high]) => [x, high]), ...known.reverse().map(([x, low]) => [x, low])]).join("L")}Z`;
}

/** Centred mean over 2·reach + 1 points that does not look across `starts`. */
function movingAverage(values, reach, starts) {
  const borders = [0, ...[...starts].filter((i) => i > 0), values.length].sort((a, b) => a - b);
  return values.map((v, i) => {
    if (v === null) return null;
    const first = borders.findLast((b) => b <= i), last = borders.find((b) => b > i);
    const near = values.slice(Math.max(first, i - reach), Math.min(last, i + reach + 1)).filter((n) => n !== null);
    return near.reduce((a, b) => a + b, 0) / near.length;
  });
}
