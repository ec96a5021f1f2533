"use strict";
// Numbers as text, scales with ticks, and paths: pure functions that know nothing of the page.

const within = (value, low, high) => Math.min(Math.max(value, low), high);

// ---------------------------------------------------------------- numbers as text

function clock(seconds) {
  const s = Math.round(seconds);
  if (seconds === 0) return "0";
  if (s < 60) return `${seconds < 10 ? seconds.toFixed(1) : s} s`;
  const pad = (n) => String(n).padStart(2, "0");
  const h = Math.floor(s / 3600);
  return h ? `${h}:${pad(Math.floor((s % 3600) / 60))}:${pad(s % 60)}` : `${Math.floor(s / 60)}:${pad(s % 60)}`;
}

function number(value) {
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size >= 1e6) return `${+(value / 1e6).toPrecision(3)}M`;
  if (size >= 1e4) return `${+(value / 1e3).toPrecision(3)}k`;
  if (size < 1e-3) return value.toExponential(1).replace(".0e", "e").replace("e-", "e−").replace("-", "−");
  return String(+value.toPrecision(3)).replace("-", "−");
}

function text(value, format) {
  if (value === null || value === undefined) return "–";
  if (format === "percent") return `${+(100 * value).toPrecision(Math.abs(value) >= 0.0995 ? 3 : 2)} %`;
  return number(value);
}

/** A tick of a linear axis, with the digits that tell it from its neighbours. */
function tickText(value, step, format) {
  const unit = format === "percent" ? 100 : 1;
  const digits = within(-Math.floor(Math.log10(step * unit) + 1e-9), 0, 6);
  if (unit === 1 && (Math.abs(value) >= 1e4 || step < 1e-4)) return number(value);
  return (value * unit).toFixed(digits).replace("-", "−") + (unit === 100 ? " %" : "");
}

// ---------------------------------------------------------------- scales

function niceStep(span, count) {
  const raw = span / count;
  const power = 10 ** Math.floor(Math.log10(raw));
  return power * [1, 2, 5, 10].find((m) => raw <= m * power * 1.0001);
}

function linearTicks(low, high, count) {
  const step = niceStep(high - low || 1, count);
  const ticks = [];
  for (let k = Math.ceil(low / step - 1e-9); k * step <= high + step * 1e-9; k++) ticks.push(+(k * step).toPrecision(12));
  return ticks;
}

function timeTicks(low, high, count) {
  const steps = [0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, 86400];
  const span = high - low;
  const step = steps.find((s) => span / s <= count) || 86400 * Math.ceil(span / 86400 / count);
  const first = Math.ceil(low / step - 1e-9);
  return Array.from({ length: Math.max(Math.floor(high / step) - first + 1, 0) }, (_, k) => (first + k) * step);
}

function logTicks(low, high) {
  const from = Math.floor(Math.log10(low)), to = Math.ceil(Math.log10(high));
  const factors = to - from > 3 ? [1] : to - from > 1 ? [1, 3] : [1, 2, 5];
  const every = Math.ceil((to - from) / 6);
  const ticks = [];
  for (let p = from; p <= to; p++) {
    if ((p - from) % every === 0) for (const f of factors) ticks.push(f * 10 ** p);
  }
  return ticks.filter((t) => t >= low * 0.999 && t <= high * 1.001);
}

/** The vertical axis of a chart that has to hold the numbers of `all`, lists with gaps. */
function verticalScale(chart, all, top, bottom) {
  let low = Infinity, high = -Infinity;
  const take = (v) => {
    if (v === null || v === undefined || (chart.scale === "log" && v <= 0)) return;
    low = Math.min(low, v);
    high = Math.max(high, v);
  };
  for (const values of all) values.forEach(take);
  if (chart.rule_in_view) take(chart.rule);
  const empty = low === Infinity;
  if (empty) { low = chart.scale === "log" ? 0.1 : 0; high = 1; }
  if (chart.scale === "log") {
    if (high / low < 4) { low /= 2; high *= 2; }
    const a = Math.log(low * 0.9), b = Math.log(high * 1.1);
    const least = Math.exp(a), foot = all.some((values) => values.includes(0)) ? 24 : 0;
    const to = (v) => { // with a foot, the axis is linear from the smallest value to 0
      if (v >= least) return bottom - foot - ((Math.log(v) - a) / (b - a)) * (bottom - foot - top);
      return foot ? bottom - (Math.max(v, 0) / least) * foot : v > 0 ? bottom : null;
    };
    const ticks = [...(foot ? [0] : []), ...(foot && empty ? [] : logTicks(least, Math.exp(b)))];
    return { to, ticks, labels: ticks.map((t) => text(t, chart.format)), low: least, high: Math.exp(b) };
  }
  if (chart.zero && low > 0) low = 0;
  if (high - low < 1e-12 * Math.max(1, Math.abs(high))) {
    const spread = Math.abs(high) * 0.1 || (chart.format === "percent" ? 0.01 : 1);
    if (low !== 0) low -= spread;
    high = chart.format === "percent" && high <= 1 ? Math.min(high + spread, 1) : high + spread;
  }
  const step = niceStep(high - low, 4);
  low = Math.floor(low / step + 1e-9) * step;
  high = Math.ceil(high / step - 1e-9) * step;
  const to = (v) => bottom - ((v - low) / (high - low)) * (bottom - top);
  const ticks = Array.from({ length: Math.round((high - low) / step) + 1 }, (_, k) => +(low + k * step).toPrecision(12));
  return { to, ticks, labels: ticks.map((t) => tickText(t, step, chart.format)), low, high };
}

// ---------------------------------------------------------------- paths

/** Consecutive runs of points that have a value; `starts` are indices at which a new run begins anyway. */
function pieces(xs, ys, starts = new Set()) {
  const all = [];
  let piece = [];
  ys.forEach((y, i) => {
    const missing = y === null || y === undefined || Number.isNaN(y);
    if (piece.length && (missing || starts.has(i))) {
      all.push(piece);
      piece = [];
    }
    if (!missing) piece.push([xs[i], y]);
  });
  if (piece.length) all.push(piece);
  return all;
}

function linePath(xs, ys, starts) {
  return pieces(xs, ys, starts).map((p) => `M${p.map(([x, y]) => `${x.toFixed(1)},${y.toFixed(1)}`).join("L")}`).join("");
}

function stepPath(xs, ys, end) {
  return pieces(xs, ys).map((p) => p.map(([x, y], i) => {
    const right = i + 1 < p.length ? p[i + 1][0] : end;
    return `${i ? "V" : `M${x.toFixed(1)},`}${y.toFixed(1)}H${right.toFixed(1)}`;
  }).join("")).join("");
}

function bandPath(xs, lows, highs) {
  const upper = [], lower = [];
  xs.forEach((x, i) => {
    if (lows[i] === null || highs[i] === null || lows[i] === undefined) return;
    upper.push(`${x.toFixed(1)},${highs[i].toFixed(1)}`);
    lower.push(`${x.toFixed(1)},${lows[i].toFixed(1)}`);
  });
  return upper.length ? `M${upper.join("L")}L${lower.reverse().join("L")}Z` : "";
}

/** More points than pixels: mean, lowest and highest of every pixel column. */
function columns(xs, ys) {
  const out = { x: [], mean: [], low: [], high: [] };
  let at = null, sum = 0, count = 0, low = 0, high = 0;
  const close = () => {
    if (!count) return;
    out.x.push(at);
    out.mean.push(sum / count);
    out.low.push(low);
    out.high.push(high);
  };
  ys.forEach((y, i) => {
    if (y === null) return;
    const x = Math.round(xs[i] / 1.5) * 1.5;
    if (x !== at) { close(); at = x; sum = 0; count = 0; low = Infinity; high = -Infinity; }
    sum += y; count += 1; low = Math.min(low, y); high = Math.max(high, y);
  });
  close();
  return out;
}

/** Centred mean over 2·reach + 1 points that does not look across `starts`. */
function movingAverage(values, reach, starts) {
  const first = [], last = [];
  values.forEach((_, i) => { first[i] = i && !starts.has(i) ? first[i - 1] : i; });
  for (let i = values.length - 1; i >= 0; i--) last[i] = i + 1 < values.length && !starts.has(i + 1) ? last[i + 1] : i;
  return values.map((v, i) => {
    if (v === null) return null;
    const near = values.slice(Math.max(first[i], i - reach), Math.min(last[i], i + reach) + 1).filter((n) => n !== null);
    return near.reduce((a, b) => a + b, 0) / near.length;
  });
}
