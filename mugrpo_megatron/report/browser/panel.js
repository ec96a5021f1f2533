"use strict";
// One chart on the page: pure SVG, redrawn for every width, so that text keeps its size.

const drawing = JSON.parse(document.getElementById("drawing").textContent);
const SVG = "http://www.w3.org/2000/svg";
const view = { along: "u", range: {} }; // abscissa: u updates, t seconds; [from, to] that is zoomed into, by abscissa
const panels = [];
const ABSCISSAE = { u: "updates", t: "wall-clock", age: "age of the stage in updates", length: "length in tokens", reward: "reward" };

function svg(name, attributes = {}, parent = null, content = "") {
  const node = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.textContent = content;
  if (parent) parent.appendChild(node);
  return node;
}

function make(name, properties = {}, ...children) {
  const node = Object.assign(document.createElement(name), properties);
  node.append(...children);
  return node;
}

const swatch = (hue, className = "") => { const node = make("i", { className }); node.style.background = color(hue); return node; };

const tip = make("div", { className: "tip", hidden: true });
document.body.appendChild(tip);

/** Show `content` (nodes or text) in a box at a pointer event, or hide the box for null. */
function showTip(event, content) {
  tip.hidden = content === null;
  if (tip.hidden) return;
  tip.replaceChildren(...[content].flat());
  const half = tip.offsetWidth / 2 + 6;
  tip.style.left = `${within(event.pageX, half, document.body.clientWidth - half)}px`;
  tip.style.top = `${event.pageY}px`;
}

/** Indices of the first point of each stage, for curves that restart with every stage; none if stages are short. */
function stageStarts(series) {
  const { u: at, starts = drawing.boundaries.map((bound) => bound.u) } = drawing.axes[series.axis];
  if (!series.restarts || at.length < 8 * starts.length) return new Set();
  return new Set(starts.map((start) => at.findIndex((u) => u >= start)));
}

class Panel {
  constructor(chart) {
    this.scaleKind = chart.scale;
    this.hidden = new Set(); // names of the curves that the reader has switched off
    this.card = document.getElementById(`chart-${chart.id}`);
    this.root = svg("svg", { role: "img", "aria-label": chart.title });
    this.legend = this.card.querySelector(".legend");
    this.card.appendChild(this.root);
    this.take(chart);
    this.addTools();
    this.listen();
  }

  /** Show this chart from now on: the panel's first, or the same one with more points. */
  take(chart) {
    this.chart = chart;
    this.values = chart.series.map(() => make("b"));
    this.legend.replaceChildren(...chart.series.map((series, k) => {
      const reach = series.smooth && series.y.length >= 48 ? Math.round(series.y.length / 48) : 0;
      series.average = reach ? movingAverage(series.y, reach, stageStarts(series)) : null;
      const item = make("button", { title: "show or hide" }, swatch(series.color, `${series.bold ? "bold " : ""}${series.draw}`), series.label, this.values[k]);
      const press = () => item.setAttribute("aria-pressed", String(!this.hidden.has(series.label)));
      item.addEventListener("click", () => { if (!this.hidden.delete(series.label)) this.hidden.add(series.label); press(); this.draw(); });
      press();
      return item;
    }));
  }

  addTools() {
    const button = (textContent, title, act) => { const node = make("button", { textContent, title }); node.addEventListener("click", act); return node; };
    const press = () => log.setAttribute("aria-pressed", String(this.scaleKind === "log"));
    const log = button("log", "logarithmic or linear vertical axis", () => { this.scaleKind = this.scaleKind === "log" ? "linear" : "log"; press(); this.draw(); });
    press();
    this.card.querySelector("h3").appendChild(make("span", { className: "tools" }, log));
  }

  /** Values where the pointer is; dragging zooms in, a double click zooms out. */
  listen() {
    let begin = null; // pixel at which the pointer went down
    const on = (name, act) => this.root.addEventListener(name, act);
    const ends = (event) => [begin, event.clientX].map((pixel) => this.valueAt(pixel)).sort((a, b) => a - b);
    const dragged = (event) => begin !== null && Math.abs(event.clientX - begin) > 6;
    const move = (event) => {
      const at = this.valueAt(event.clientX);
      hover(this.chart.along, at);
      if (event.pointerType === "mouse") showTip(event, this.box(at));
      if (!dragged(event)) return;
      const [from, to] = ends(event).map(this.x);
      svg("rect", { x: from, width: to - from, y: this.top, height: this.bottom - this.top, fill: color("accent"), "fill-opacity": 0.14 }, this.cursor);
    };
    on("pointerdown", (event) => { if (event.button === 0 && event.pointerType === "mouse") begin = event.clientX; move(event); });
    on("pointermove", move);
    on("pointerup", (event) => { if (dragged(event)) zoom(this.axis, ends(event)); begin = null; });
    on("pointerleave", () => { begin = null; showTip(null, null); hover(null, null); });
    on("dblclick", () => zoom(this.axis, null));
  }

  /** Which abscissa the panel has: u or t like the page, or one of its own. */
  get axis() { return this.chart.along === "run" ? view.along : this.chart.along; }
  get end() { return drawing.end[this.axis] || 1; }
  get shown() { return this.chart.series.filter((series) => !this.hidden.has(series.label)); }

  positions(series) { return drawing.axes[series.axis][this.axis === "t" ? "t" : "u"]; }

  draw() {
    const { chart, root } = this, width = this.width = root.clientWidth;
    root.replaceChildren();
    if (!width) return; // its section is folded
    const height = chart.wide ? 344 : 230;
    root.setAttribute("height", height);
    const bounds = chart.along === "run" && drawing.boundaries.length > 1 ? drawing.boundaries : [];
    this.top = bounds.length ? 22 : 10;
    this.bottom = height - 38;
    [this.from, this.to] = view.range[this.axis] || [drawing.begin[this.axis] || 0, this.end];
    const scale = this.scale = verticalScale({ ...chart, scale: this.scaleKind }, this.inView(), this.top, this.bottom);
    const left = this.left = 12 + 6.6 * Math.max(3, ...scale.labels.map((label) => label.length)), right = this.right = width - 10;
    this.x = (v) => left + ((v - this.from) / (this.to - this.from)) * (right - left);
    scale.ticks.forEach((tick, i) => {
      const y = scale.to(tick);
      svg("line", { x1: left, x2: right, y1: y, y2: y, stroke: color("grid") }, root);
      svg("text", { x: left - 7, y: y + 4, "text-anchor": "end" }, root, scale.labels[i]);
    });
    svg("text", { x: 0, y: height - 6, class: "unit" }, root, chart.unit);
    this.drawAbscissa();
    const clip = svg("clipPath", { id: `clip-${chart.id}` }, root);
    svg("rect", { x: left - 5, y: 0, width: right - left + 10, height: this.bottom + 6 }, clip);
    this.plot = svg("g", { "clip-path": `url(#clip-${chart.id})` }, root);
    this.drawBoundaries(bounds);
    this.shown.forEach((series, k) => this.drawSeries(series, k));
    this.drawRule();
    this.cursor = svg("g", { "pointer-events": "none" }, root);
    svg("rect", { width, height, fill: "transparent" }, root);
    this.showValues(null);
  }

  /** The values that the vertical axis must hold: those of the shown curves inside the zoomed range. */
  inView() {
    return this.shown.flatMap((series) => {
      const xs = this.positions(series), inside = (_, i) => xs[i] >= this.from - 1e-9 && xs[i] <= this.to + 1e-9;
      return [series.y, series.low || [], series.high || []].flatMap((values) => values.filter(inside));
    });
  }

  drawAbscissa() {
    const seconds = this.axis === "t", count = Math.max(3, (this.right - this.left) / 95), unit = ABSCISSAE[this.axis];
    const bars = this.chart.series.find((series) => series.draw === "bars");
    const ticks = bars ? this.positions(bars) : seconds ? timeTicks(this.from, this.to, count) : linearTicks(this.from, this.to, count, this.axis !== "reward");
    for (const tick of ticks) {
      const x = this.x(tick), label = seconds ? clock(tick) : bars ? number(tick) : tick.toLocaleString("en"), half = 3.4 * label.length;
      svg("line", { x1: x, x2: x, y1: this.bottom, y2: this.bottom + 4, stroke: color("line") }, this.root);
      svg("text", { x: Math.min(x, this.right - half), y: this.bottom + 17, "text-anchor": "middle" }, this.root, label);
    }
    svg("text", { x: this.right, y: this.bottom + 32, "text-anchor": "end", class: "unit" }, this.root, unit);
    svg("line", { x1: this.left, x2: this.right, y1: this.bottom, y2: this.bottom, stroke: color("line") }, this.root);
  }

  /** A line and a name above the curves where each stage begins, as far as there is room. */
  drawBoundaries(every) {
    const bounds = every.map((bound) => ({ stage: bound.stage, at: bound[view.along] })).filter(({ at }) => at >= this.from && at <= this.to);
    if ((this.right - this.left) / bounds.length < 7) return;
    let free = this.left - 1; // labels end here so far
    for (const { stage, at } of bounds) {
      const x = this.x(at);
      if (at) svg("line", { x1: x, x2: x, y1: this.top - 4, y2: this.bottom, stroke: color("faint"), "stroke-opacity": 0.5, "stroke-dasharray": "2 3" }, this.plot);
      if (x < free || x + 52 > this.right) continue;
      svg("text", { x: x + 3, y: this.top - 9, class: "stage" }, this.plot, `stage ${stage}`);
      free = x + 52;
    }
  }

  drawRule() {
    const { rule, rule_label: label } = this.chart;
    if (rule === null || rule < this.scale.low || rule > this.scale.high) return;
    const y = this.scale.to(rule);
    svg("line", { x1: this.left, x2: this.right, y1: y, y2: y, stroke: color("soft"), "stroke-dasharray": "5 4" }, this.root);
    svg("text", { x: this.right, y: y - this.top < 12 ? y + 14 : y - 5, "text-anchor": "end", class: "unit" }, this.root, `${label} ${number(rule)}`);
  }

  drawSeries(series, place) {
    const { plot, scale } = this, xs = this.positions(series).map(this.x), stroke = color(series.color), count = xs.length;
    const toY = (values) => values.map((v) => (v === null || v === undefined ? null : scale.to(v)));
    const ys = toY(series.y), parts = pieces(xs, ys, stageStarts(series));
    const line = (d, attributes = {}) => svg("path", { d, fill: "none", stroke, "stroke-width": series.bold ? 3.4 : 2, "stroke-linejoin": "round", "stroke-linecap": "round", ...attributes }, plot);
    const dot = (cx, cy, r, attributes = {}) => svg("circle", { cx, cy, r, fill: stroke, ...attributes }, plot);
    if (series.draw === "bars") return this.drawBars(place, xs, ys, stroke);
    if (series.draw === "points") return parts.flat().forEach(([x, y]) => dot(x, y, 4, { "fill-opacity": 0.8 }));
    if (series.draw === "step") return line(stepPath(parts, this.x(this.end)));
    if (series.low) this.drawIntervals(xs, toY(series.low), toY(series.high), stroke, place);
    if (series.average) line(linePath(parts), { "stroke-width": 1, "stroke-opacity": 0.32 });
    line(linePath(series.average ? pieces(xs, toY(series.average), stageStarts(series)) : parts));
    if (series.draw === "dots" && count <= 130) parts.flat().forEach(([x, y]) => dot(x, y, count < 40 ? 4.5 : 3, { stroke: color("card"), "stroke-width": 2 }));
    else parts.filter((piece) => piece.length === 1).forEach(([[x, y]]) => dot(x, y, 3));
  }

  /** A band around the only curve that has intervals; of several, whiskers side by side, which do not hide each other. */
  drawIntervals(xs, lows, highs, stroke, place) {
    const others = this.shown.filter((series) => series.low).length;
    if (others === 1) svg("path", { d: bandPath(xs, lows, highs), fill: stroke, "fill-opacity": 0.15 }, this.plot);
    if (xs.length >= 40) return;
    xs.map((x) => x + (others > 1 ? 4 * (place - (others - 1) / 2) : 0)).forEach((x, i) => {
      if (lows[i] !== null && highs[i] !== null) svg("line", { x1: x, x2: x, y1: lows[i], y2: highs[i], stroke, "stroke-opacity": 0.55 }, this.plot);
    });
  }

  /** Bars of all shown series side by side at each place. */
  drawBars(place, xs, ys, fill) {
    const gaps = xs.slice(1).map((x, i) => x - xs[i]), room = Math.min(360, ...gaps);
    const width = (0.72 * room) / this.shown.length, first = -0.5 * width * this.shown.length, foot = this.scale.to(0) ?? this.bottom;
    xs.forEach((x, i) => {
      if (ys[i] !== null) svg("rect", { x: x + first + place * width, width: 0.9 * width, y: ys[i], height: Math.max(foot - ys[i], 0), fill }, this.plot);
    });
  }

  /** The place on the abscissa under a pixel of the window. */
  valueAt(pixel) {
    const x = pixel - this.root.getBoundingClientRect().left;
    return this.from + within((x - this.left) / (this.right - this.left), 0, 1) * (this.to - this.from);
  }

  /** The value of a series at a place: of the nearest point, or of the step that holds there; and where it is. */
  at(series, place) {
    const xs = this.positions(series), next = xs.findIndex((x) => x > place), high = next === -1 ? xs.length : next;
    const before = series.draw === "step" || high === 0 || high === xs.length || place - xs[high - 1] <= xs[high] - place;
    const index = Math.max(before ? high - 1 : high, 0);
    return [series.y[index] ?? null, series.draw === "step" ? place : xs[index]];
  }

  /** What the legend says of a curve while the pointer is elsewhere: its end, smoothed; nothing of a histogram. */
  resting(series) {
    if (this.chart.along === "length" || this.chart.along === "reward") return "";
    return text((series.average || series.y).findLast((value) => value !== null) ?? null, this.chart.format);
  }

  /** Put the values at `place` into the legend and mark them; the resting ones for null. */
  showValues(place) {
    if (!this.width) return;
    this.cursor.replaceChildren();
    this.chart.series.forEach((series, k) => {
      const [value, x] = place === null ? [null, null] : this.at(series, place);
      this.values[k].textContent = place === null ? this.resting(series) : text(value, this.chart.format);
      const y = value === null || this.hidden.has(series.label) ? null : this.scale.to(value);
      if (y !== null && x >= this.from && x <= this.to) svg("circle", { cx: this.x(x), cy: y, r: 4, fill: color(series.color), stroke: color("card"), "stroke-width": 1.5 }, this.cursor);
    });
    if (place === null || place < this.from || place > this.to || this.chart.series[0]?.draw === "bars") return;
    const x = this.x(place);
    this.cursor.prepend(svg("line", { x1: x, x2: x, y1: this.top, y2: this.bottom, stroke: color("hover"), "stroke-opacity": 0.35 }));
  }

  /** The content of the box at the pointer. */
  box(place) {
    const rows = this.shown.map((series) => make("div", {}, swatch(series.color), series.label, make("b", {}, text(this.at(series, place)[0], this.chart.format))));
    return [make("div", {}, placeText(this.chart.along, place)), ...rows];
  }
}
