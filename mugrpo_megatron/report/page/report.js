"use strict";
// Draws the report's charts from the JSON in the page. Pure SVG, redrawn for every width, so that text keeps its size.

const drawing = JSON.parse(document.getElementById("drawing").textContent);
const SVG = "http://www.w3.org/2000/svg";
const view = { along: "u", at: null }; // abscissa: u updates, t seconds; `at` is where the pointer is
const panels = [];

function svg(name, attributes = {}, parent = null) {
  const node = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (parent) parent.appendChild(node);
  return node;
}

const color = (name) => `var(--${name})`;

// ---------------------------------------------------------------- one chart

/** Indices of the first point of each stage, for curves that restart with every stage; none if stages are short. */
function stageStarts(series) {
  const bounds = drawing.boundaries, at = drawing.axes[series.axis].u;
  if (!series.restarts || at.length < 8 * bounds.length) return new Set();
  return new Set(bounds.map((bound) => at.findIndex((u) => u >= bound.u)));
}

class Panel {
  constructor(chart) {
    this.chart = chart;
    this.card = document.getElementById(`chart-${chart.id}`);
    this.root = svg("svg", { role: "img", "aria-label": chart.title });
    this.legend = this.card.querySelector(".legend");
    this.card.appendChild(this.root);
    this.values = chart.series.map((series) => {
      const reach = series.smooth && series.y.length >= 48 ? Math.round(series.y.length / 48) : 0;
      series.average = reach ? movingAverage(series.y, reach, stageStarts(series)) : null;
      const item = document.createElement("span");
      const swatch = document.createElement("i");
      swatch.style.background = color(series.color);
      swatch.className = `${series.bold ? "bold " : ""}${series.draw}`;
      const value = document.createElement("b");
      item.append(swatch, series.label, value);
      this.legend.appendChild(item);
      return value;
    });
    const point = (event) => this.pointAt(event.clientX - this.root.getBoundingClientRect().left);
    this.root.addEventListener("pointermove", point);
    this.root.addEventListener("pointerdown", point);
    this.root.addEventListener("pointerleave", () => { hover(null, null); });
  }

  get axisKey() { return this.chart.along === "age" ? "u" : view.along; }
  get end() { return this.chart.along === "age" ? Math.max(drawing.axes.age.u.length - 1, 1) : drawing.end[view.along] || 1; }

  positions(series) { return drawing.axes[series.axis][this.axisKey]; }

  draw() {
    const { chart, root } = this;
    root.replaceChildren();
    const width = this.width = root.clientWidth, height = this.card.classList.contains("wide") ? 330 : 216;
    root.setAttribute("height", height);
    const scale = verticalScale(chart, 10, height - 24);
    const { labels } = scale;
    const left = this.left = 12 + 6.6 * Math.max(3, ...labels.map((l) => l.length));
    const right = this.right = width - 10, bottom = height - 24;
    this.top = 10;
    this.bottom = bottom;
    this.x = (v) => left + (v / this.end) * (right - left);
    this.scale = scale;
    scale.ticks.forEach((tick, i) => {
      const y = scale.to(tick);
      svg("line", { x1: left, x2: right, y1: y, y2: y, stroke: color("grid") }, root);
      svg("text", { x: left - 7, y: y + 4, "text-anchor": "end" }, root).textContent = labels[i];
    });
    this.drawAbscissa();
    if (chart.along === "run") this.drawBoundaries();
    chart.series.forEach((series) => this.drawSeries(series));
    this.drawRule();
    this.cursor = svg("g", { "pointer-events": "none" }, root);
    svg("rect", { x: 0, y: 0, width, height, fill: "transparent" }, root);
    this.showValues(null);
  }

  drawAbscissa() {
    const count = Math.max(3, (this.right - this.left) / 95);
    const seconds = this.axisKey === "t" && this.chart.along === "run";
    const ticks = seconds ? timeTicks(this.end, count) : linearTicks(0, this.end, count).filter((t) => Number.isInteger(t));
    const unit = this.chart.along === "age" ? "age in updates" : seconds ? "wall-clock" : "updates";
    const unitStart = this.right - 6.3 * unit.length - 8;
    for (const tick of ticks) {
      const x = this.x(tick), label = seconds ? clock(tick) : tick.toLocaleString("en");
      const half = 3.4 * label.length;
      if (x + half > unitStart) continue;
      svg("text", { x: Math.max(x, this.left), y: this.bottom + 18, "text-anchor": tick === 0 ? "start" : "middle" }, this.root).textContent = label;
    }
    svg("text", { x: this.right, y: this.bottom + 18, "text-anchor": "end", class: "unit" }, this.root).textContent = unit;
    svg("line", { x1: this.left, x2: this.right, y1: this.bottom, y2: this.bottom, stroke: color("line") }, this.root);
  }

  drawBoundaries() {
    const bounds = drawing.boundaries, room = (this.right - this.left) / bounds.length;
    if (bounds.length < 2 || room < 7) return;
    const labelled = this.card.classList.contains("wide") && room > 58;
    bounds.forEach((bound, i) => {
      const x = this.x(bound[view.along]);
      if (i) svg("line", { x1: x, x2: x, y1: this.top, y2: this.bottom, stroke: color("faint"), "stroke-opacity": room < 16 ? 0.3 : 0.6, "stroke-dasharray": "2 3" }, this.root);
      if (labelled) svg("text", { x: x + 6, y: this.bottom - 7 }, this.root).textContent = `stage ${bound.stage + 1}`;
    });
  }

  drawRule() {
    const { rule, rule_label: label } = this.chart;
    if (rule === null || rule < this.scale.low || rule > this.scale.high) return;
    const y = this.scale.to(rule);
    svg("line", { x1: this.left, x2: this.right, y1: y, y2: y, stroke: color("soft"), "stroke-dasharray": "5 4" }, this.root);
    svg("text", { x: this.right, y: y - this.top < 12 ? y + 14 : y - 5, "text-anchor": "end", class: "unit" }, this.root).textContent = `${label} ${number(rule)}`;
  }

  drawSeries(series) {
    const xs = this.positions(series).map(this.x);
    const toY = (values) => values.map((v) => (v === null || v === undefined ? null : this.scale.to(v)));
    const ys = toY(series.y), stroke = color(series.color);
    const thick = series.bold ? 3.4 : 2;
    const line = (d, attributes = {}) => svg("path", { d, fill: "none", stroke, "stroke-width": thick, "stroke-linejoin": "round", "stroke-linecap": "round", ...attributes }, this.root);
    if (series.low) svg("path", { d: bandPath(xs, toY(series.low), toY(series.high)), fill: stroke, "fill-opacity": 0.15 }, this.root);
    if (ys.length < 400) {
      const alone = pieces(xs, ys, stageStarts(series)).filter((piece) => piece.length === 1 && series.draw === "line");
      for (const [[cx, cy]] of alone) svg("circle", { cx, cy, r: 3, fill: stroke }, this.root);
    }
    if (series.draw === "dots") return this.drawDots(series, xs, ys, line);
    if (series.draw === "step") {
      line(stepPath(xs, ys, this.x(this.end)));
      return null;
    }
    const starts = stageStarts(series), average = series.average && toY(series.average);
    const dense = ys.length > 0.75 * (this.right - this.left);
    if (dense) {
      const parts = pieces(xs, ys, starts).map((piece) => columns(piece.map(([x]) => x), piece.map(([, y]) => y)));
      svg("path", { d: parts.map((c) => bandPath(c.x, c.low, c.high)).join(""), fill: stroke, "fill-opacity": this.chart.series.length > 3 ? 0.13 : 0.22 }, this.root);
      const curve = average ? linePath(xs, average, starts) : parts.map((c) => linePath(c.x, c.mean)).join("");
      return line(curve, { "stroke-width": average ? thick : 0.7 * thick });
    }
    if (average) line(linePath(xs, ys, starts), { "stroke-width": 1, "stroke-opacity": 0.32 });
    return line(linePath(xs, average || ys, starts));
  }

  drawDots(series, xs, ys, line) {
    line(linePath(xs, ys));
    if (ys.length > 130) return;
    ys.forEach((y, i) => {
      if (y === null) return;
      if (series.low && series.low[i] !== null) {
        const [from, to] = [this.scale.to(series.low[i]), this.scale.to(series.high[i])];
        if (ys.length < 40) svg("line", { x1: xs[i], x2: xs[i], y1: from, y2: to, stroke: color(series.color), "stroke-opacity": 0.55 }, this.root);
      }
      svg("circle", { cx: xs[i], cy: y, r: ys.length < 40 ? 4.5 : 3, fill: color(series.color), stroke: color("card"), "stroke-width": 2 }, this.root);
    });
  }

  pointAt(pixel) {
    const at = within((pixel - this.left) / (this.right - this.left), 0, 1) * this.end;
    hover(this.chart.along, at);
  }

  /** The point of a series that the cursor at `at` stands for; steps hold until the next one. */
  indexAt(series, at) {
    const xs = this.positions(series);
    if (!xs.length) return -1;
    let high = xs.findIndex((x) => x > at);
    if (high === -1) high = xs.length;
    if (series.draw === "step" || high === 0 || high === xs.length) return Math.max(high - 1, 0);
    return xs[high] - at < at - xs[high - 1] ? high : high - 1;
  }

  showValues(at) {
    this.cursor.replaceChildren();
    this.chart.series.forEach((series, k) => {
      let index = at === null ? series.y.length - 1 : this.indexAt(series, at);
      if (at === null) while (index > 0 && series.y[index] === null) index -= 1;
      const value = index < 0 ? null : series.y[index];
      this.values[k].textContent = text(value, this.chart.format);
      if (at === null || value === null || value === undefined) return;
      const y = this.scale.to(value), x = this.x(series.draw === "step" ? at : this.positions(series)[index]);
      if (y !== null) svg("circle", { cx: x, cy: y, r: 4, fill: color(series.color), stroke: color("card"), "stroke-width": 1.5 }, this.cursor);
    });
    if (at !== null) {
      const x = this.x(at);
      const rule = svg("line", { x1: x, x2: x, y1: this.top, y2: this.bottom, stroke: color("hover"), "stroke-opacity": 0.35 });
      this.cursor.prepend(rule);
    }
  }
}

// ---------------------------------------------------------------- the time line

class Timeline {
  constructor() {
    this.card = document.getElementById("chart-timeline");
    this.root = svg("svg", { role: "img", "aria-label": "Time line" });
    this.card.appendChild(this.root);
    this.tip = document.createElement("div");
    this.tip.className = "tip";
    this.tip.hidden = true;
    document.body.appendChild(this.tip);
    this.root.addEventListener("pointermove", (event) => this.point(event));
    this.root.addEventListener("pointerdown", (event) => this.point(event));
    this.root.addEventListener("pointerleave", () => { this.tip.hidden = true; hover(null, null); });
  }

  draw() {
    const { phases, spans, slices } = drawing.timeline, lane = 27;
    const height = phases.length * lane + 34;
    this.root.replaceChildren();
    this.root.setAttribute("height", height);
    const left = this.left = 74, right = this.right = this.root.clientWidth - 10, bottom = height - 24;
    const x = this.x = (t) => left + (t / drawing.end.t) * (right - left);
    for (const tick of timeTicks(drawing.end.t, Math.max(3, (right - left) / 95))) {
      svg("line", { x1: x(tick), x2: x(tick), y1: 4, y2: bottom, stroke: color("grid") }, this.root);
      if (x(tick) < right - 14) svg("text", { x: x(tick), y: bottom + 18, "text-anchor": tick ? "middle" : "start" }, this.root).textContent = clock(tick);
    }
    phases.forEach((phase, i) => {
      svg("text", { x: 2, y: 4 + i * lane + 18, class: "lane" }, this.root).textContent = phase;
      svg("line", { x1: left, x2: right, y1: 4 + (i + 1) * lane, y2: 4 + (i + 1) * lane, stroke: color("grid") }, this.root);
    });
    const box = (phase, from, to, opacity) => svg("rect", {
      x: x(from), width: Math.max(x(to) - x(from), 0.8), y: 8 + phase * lane, height: lane - 8, rx: Math.min(3, (x(to) - x(from)) / 3),
      fill: color(drawing.colors[phases[phase]]), "fill-opacity": opacity,
    }, this.root);
    for (const [phase, , start, end] of spans) box(phase, start, end, 1);
    slices.forEach((row, phase) => row.forEach((share, k) => {
      const width = drawing.end.t / row.length;
      if (share > 0.004) box(phase, k * width, (k + 1) * width, Math.max(share, 0.08));
    }));
    this.cursor = svg("line", { y1: 4, y2: bottom, stroke: color("hover"), "stroke-opacity": 0.35, visibility: "hidden" }, this.root);
  }

  point(event) {
    const frame = this.root.getBoundingClientRect();
    const t = within((event.clientX - frame.left - this.left) / (this.right - this.left), 0, 1) * drawing.end.t;
    const lane = Math.floor((event.clientY - frame.top - 4) / 27);
    const slack = drawing.end.t / 400;
    const hit = drawing.timeline.spans.filter(([phase, , start, end]) => phase === lane && t > start - slack && t < end + slack)
      .sort((a, b) => Math.abs(a[2] + a[3] - 2 * t) - Math.abs(b[2] + b[3] - 2 * t))[0];
    this.tip.hidden = !hit;
    if (hit) {
      const known = drawing.boundaries.some((bound) => bound.stage === hit[1]);
      const stage = known ? `stage ${hit[1] + 1}` : "outside the stages";
      this.tip.textContent = `${drawing.timeline.phases[lane]} · ${stage} · ${clock(hit[3] - hit[2])} from ${clock(hit[2])}`;
      this.tip.style.left = `${within(event.pageX, 120, document.body.clientWidth - 120)}px`;
      this.tip.style.top = `${event.pageY}px`;
    }
    if (view.along === "t") hover("run", t);
  }

  showAt(at) {
    const shown = at !== null && view.along === "t";
    this.cursor.setAttribute("visibility", shown ? "visible" : "hidden");
    if (shown) for (const key of ["x1", "x2"]) this.cursor.setAttribute(key, this.x(at));
  }
}

// ---------------------------------------------------------------- the page

const where = document.querySelector(".where");
const restingText = where.textContent;
let timeline = null;

function hover(along, at) {
  for (const panel of panels) panel.showValues(panel.chart.along === along ? at : null);
  if (timeline) timeline.showAt(along === "run" ? at : null);
  if (at === null) where.textContent = restingText;
  else if (along === "age") where.textContent = `age ${Math.round(at)}`;
  else {
    const passed = drawing.boundaries.filter((b) => b[view.along] <= at + 1e-9);
    const stage = passed.length ? `stage ${passed[passed.length - 1].stage + 1} · ` : "";
    where.textContent = stage + (view.along === "u" ? `update ${Math.round(at).toLocaleString("en")}` : clock(at));
  }
}

function drawAll() {
  for (const panel of panels) panel.draw();
  if (timeline) timeline.draw();
}

for (const chart of drawing.charts) panels.push(new Panel(chart));
if (drawing.timeline.phases.length) timeline = new Timeline();
for (const button of document.querySelectorAll(".switch button")) {
  button.addEventListener("click", () => {
    view.along = button.dataset.along;
    for (const other of document.querySelectorAll(".switch button")) other.setAttribute("aria-pressed", String(other === button));
    drawAll();
  });
}
let drawnWidth = document.body.clientWidth;
drawAll();
new ResizeObserver(() => {
  if (document.body.clientWidth === drawnWidth) return;
  drawnWidth = document.body.clientWidth;
  drawAll();
}).observe(document.body);
