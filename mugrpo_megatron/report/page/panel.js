"use strict";
// State of the page, and SVG helpers. Charts are pure SVG, redrawn for every width, so that text keeps its size.

const drawing = JSON.parse(document.getElementById("drawing").textContent);
const SVG = "http://www.w3.org/2000/svg";
const view = {
  along: "u", // abscissa: u updates, t seconds
  range: { u: null, t: null, age: null, length: null, reward: null }, // [from, to] that is zoomed into, by abscissa
};
const panels = [];
const ABSCISSAE = { u: "updates", t: "wall-clock", age: "age of the stage in updates", length: "length in tokens", reward: "reward" };

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
    new Dragging(this);
  }

  /** Show this chart from now on: the panel's first, or the same one with more points. */
  take(chart) {
    this.chart = chart;
    this.legend.replaceChildren();
    this.values = chart.series.map((series) => {
      const reach = series.smooth && series.y.length >= 48 ? Math.round(series.y.length / 48) : 0;
      series.average = reach ? movingAverage(series.y, reach, stageStarts(series)) : null;
      return this.addToLegend(series);
    });
  }

  addToLegend(series) {
    const item = document.createElement("button");
    const swatch = document.createElement("i"), value = document.createElement("b");
    swatch.style.background = color(series.color);
    swatch.className = `${series.bold ? "bold " : ""}${series.draw}`;
    item.append(swatch, series.label, value);
    item.title = "show or hide";
    item.setAttribute("aria-pressed", String(!this.hidden.has(series.label)));
    item.addEventListener("click", () => {
      const hide = !this.hidden.has(series.label);
      this.hidden[hide ? "add" : "delete"](series.label);
      item.setAttribute("aria-pressed", String(!hide));
      this.draw();
    });
    this.legend.appendChild(item);
    return value;
  }

  addTools() {
    const tools = document.createElement("span");
    tools.className = "tools";
    const button = (label, title, act) => {
      const node = document.createElement("button");
      Object.assign(node, { textContent: label, title });
      node.addEventListener("click", () => act(node));
      tools.appendChild(node);
      return node;
    };
    const log = button("log", "logarithmic or linear vertical axis", (node) => {
      this.scaleKind = this.scaleKind === "log" ? "linear" : "log";
      node.setAttribute("aria-pressed", String(this.scaleKind === "log"));
      this.draw();
    });
    log.setAttribute("aria-pressed", String(this.scaleKind === "log"));
    button("CSV", "the values of this panel as a file", () => saveCsv(this));
    button("PNG", "this panel as a picture", () => savePng(this));
    this.card.querySelector("h3").appendChild(tools);
  }

  /** Which abscissa the panel has: u or t like the page, or one of its own. */
  get axis() { return this.chart.along === "run" ? view.along : this.chart.along; }
  get axisKey() { return this.axis === "t" ? "t" : "u"; }
  get begin() { return drawing.begin[this.axis] || 0; }
  get end() { return drawing.end[this.axis] || 1; }
  get shown() { return this.chart.series.filter((series) => !this.hidden.has(series.label)); }

  positions(series) { return drawing.axes[series.axis][this.axisKey]; }

  draw() {
    const { chart, root } = this;
    root.replaceChildren();
    const width = this.width = root.clientWidth, height = this.card.classList.contains("wide") ? 344 : 230;
    root.setAttribute("height", height);
    this.top = chart.unit ? 20 : 10;
    this.bottom = height - 38;
    [this.from, this.to] = view.range[this.axis] || [this.begin, this.end];
    const scale = this.scale = verticalScale({ ...chart, scale: this.scaleKind }, this.inView(), this.top, this.bottom);
    const left = this.left = 12 + 6.6 * Math.max(3, ...scale.labels.map((l) => l.length));
    const right = this.right = width - 10;
    this.x = (v) => left + ((v - this.from) / (this.to - this.from)) * (right - left);
    scale.ticks.forEach((tick, i) => {
      const y = scale.to(tick);
      svg("line", { x1: left, x2: right, y1: y, y2: y, stroke: color("grid") }, root);
      svg("text", { x: left - 7, y: y + 4, "text-anchor": "end" }, root).textContent = scale.labels[i];
    });
    if (chart.unit) svg("text", { x: 0, y: 9, class: "unit" }, root).textContent = chart.unit;
    this.drawAbscissa();
    this.plot = svg("g", { "clip-path": `url(#clip-${chart.id})` }, root);
    const clip = svg("clipPath", { id: `clip-${chart.id}` }, root);
    svg("rect", { x: left - 5, y: 0, width: right - left + 10, height: this.bottom + 6 }, clip);
    if (this.chart.along === "run") this.drawBoundaries();
    this.shown.forEach((series) => this.drawSeries(series));
    this.drawRule();
    this.cursor = svg("g", { "pointer-events": "none" }, root);
    svg("rect", { x: 0, y: 0, width, height, fill: "transparent" }, root);
    this.showValues(null);
  }

  /** The values that the vertical axis must hold: those of the shown curves inside the zoomed range. */
  inView() {
    const inside = (series) => {
      const xs = this.positions(series);
      return (values) => (values || []).filter((_, i) => xs[i] >= this.from - 1e-9 && xs[i] <= this.to + 1e-9);
    };
    return this.shown.flatMap((s) => [s.y, s.low, s.high, s.average].map(inside(s)));
  }

  drawAbscissa() {
    const count = Math.max(3, (this.right - this.left) / 95);
    const seconds = this.axis === "t";
    const every = seconds ? timeTicks(this.from, this.to, count) : linearTicks(this.from, this.to, count);
    const ticks = seconds || this.axis === "reward" ? every : every.filter((t) => Number.isInteger(t));
    const whole = this.axis === "u" && Number.isInteger(this.to); // the last update can be read off
    if (whole && this.x(this.to) - this.x(ticks[ticks.length - 1] ?? this.from) > 52) ticks.push(this.to);
    for (const tick of ticks) {
      const x = this.x(tick), label = seconds ? clock(tick) : tick.toLocaleString("en"), half = 3.4 * label.length;
      const at = within(x, this.left + (tick === this.from ? half : 0), this.right - half);
      svg("line", { x1: x, x2: x, y1: this.bottom, y2: this.bottom + 4, stroke: color("line") }, this.root);
      svg("text", { x: at, y: this.bottom + 17, "text-anchor": "middle" }, this.root).textContent = label;
    }
    const unit = ABSCISSAE[this.axis];
    svg("text", { x: this.right, y: this.bottom + 32, "text-anchor": "end", class: "unit" }, this.root).textContent = unit;
    svg("line", { x1: this.left, x2: this.right, y1: this.bottom, y2: this.bottom, stroke: color("line") }, this.root);
  }

  drawBoundaries() {
    const bounds = drawing.boundaries.filter((bound) => bound[view.along] >= this.from && bound[view.along] <= this.to);
    const room = (this.right - this.left) / bounds.length;
    if (drawing.boundaries.length < 2 || room < 7) return;
    let free = this.left - 1; // labels end here so far: of stages that are too short for theirs, the first has its label
    for (const bound of bounds) {
      const x = this.x(bound[view.along]);
      if (bound[view.along]) svg("line", { x1: x, x2: x, y1: this.top, y2: this.bottom, stroke: color("faint"), "stroke-opacity": room < 16 ? 0.3 : 0.6, "stroke-dasharray": "2 3" }, this.plot);
      if (room <= 20 || x < free || x + 52 > this.right) continue;
      svg("text", { x: x + 6, y: this.bottom - 7, class: "stage" }, this.plot).textContent = `stage ${bound.stage}`;
      free = x + 52;
    }
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
    const line = (d, attributes = {}) => svg("path", { d, fill: "none", stroke, "stroke-width": thick, "stroke-linejoin": "round", "stroke-linecap": "round", ...attributes }, this.plot);
    if (series.low) svg("path", { d: bandPath(xs, toY(series.low), toY(series.high)), fill: stroke, "fill-opacity": 0.15 }, this.plot);
    if (series.draw === "bars") return this.drawBars(series, xs, ys);
    if (series.draw === "points") return xs.forEach((cx, i) => svg("circle", { cx, cy: ys[i], r: 4, fill: stroke, "fill-opacity": 0.8 }, this.plot));
    if (ys.length < 400) {
      const alone = pieces(xs, ys, stageStarts(series)).filter((piece) => piece.length === 1 && series.draw === "line");
      for (const [[cx, cy]] of alone) svg("circle", { cx, cy, r: 3, fill: stroke }, this.plot);
    }
    if (series.draw === "dots") return this.drawDots(series, xs, ys, line);
    if (series.draw === "step") return line(stepPath(xs, ys, this.x(this.end)));
    const starts = stageStarts(series), average = series.average && toY(series.average);
    const visible = xs.filter((x) => x >= this.left && x <= this.right).length;
    if (visible > 0.75 * (this.right - this.left)) {
      const parts = pieces(xs, ys, starts).map((piece) => columns(piece.map(([x]) => x), piece.map(([, y]) => y)));
      svg("path", { d: parts.map((c) => bandPath(c.x, c.low, c.high)).join(""), fill: stroke, "fill-opacity": this.chart.series.length > 3 ? 0.13 : 0.22 }, this.plot);
      const curve = average ? linePath(xs, average, starts) : parts.map((c) => linePath(c.x, c.mean)).join("");
      return line(curve, { "stroke-width": average ? thick : 0.7 * thick });
    }
    if (average) line(linePath(xs, ys, starts), { "stroke-width": 1, "stroke-opacity": 0.32 });
    return line(linePath(xs, average || ys, starts));
  }

  /** Bars of all shown series side by side at each place. */
  drawBars(series, xs, ys) {
    const gaps = xs.slice(1).map((x, i) => x - xs[i]), room = gaps.length ? Math.min(...gaps) : this.right - this.left;
    const width = (0.72 * Math.min(room, 360)) / this.shown.length, first = -0.5 * width * this.shown.length;
    const foot = this.scale.to(0) ?? this.bottom, place = this.shown.indexOf(series);
    xs.forEach((x, i) => {
      if (ys[i] !== null) svg("rect", { x: x + first + place * width, width: 0.9 * width, y: ys[i], height: Math.max(foot - ys[i], 0), fill: color(series.color) }, this.plot);
    });
  }

  drawDots(series, xs, ys, line) {
    line(linePath(xs, ys));
    if (ys.length > 130) return;
    ys.forEach((y, i) => {
      if (y === null) return;
      if (series.low && series.low[i] !== null && ys.length < 40) {
        const [from, to] = [this.scale.to(series.low[i]), this.scale.to(series.high[i])];
        svg("line", { x1: xs[i], x2: xs[i], y1: from, y2: to, stroke: color(series.color), "stroke-opacity": 0.55 }, this.plot);
      }
      svg("circle", { cx: xs[i], cy: y, r: ys.length < 40 ? 4.5 : 3, fill: color(series.color), stroke: color("card"), "stroke-width": 2 }, this.plot);
    });
  }

  /** The place on the abscissa under a pixel of the window. */
  valueAt(pixel) {
    const x = pixel - this.root.getBoundingClientRect().left;
    return this.from + within((x - this.left) / (this.right - this.left), 0, 1) * (this.to - this.from);
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

  /** Put the values at `at` into the legend and mark them; the last ones for null. */
  showValues(at) {
    this.cursor.replaceChildren();
    this.chart.series.forEach((series, k) => {
      let index = at === null ? series.y.length - 1 : this.indexAt(series, at);
      if (at === null) while (index > 0 && series.y[index] === null) index -= 1;
      const value = index < 0 ? null : series.y[index];
      this.values[k].textContent = text(value, this.chart.format);
      if (at === null || value === null || value === undefined || this.hidden.has(series.label)) return;
      const y = this.scale.to(value), x = this.x(series.draw === "step" ? at : this.positions(series)[index]);
      if (y !== null && x >= this.left - 1 && x <= this.right + 1) svg("circle", { cx: x, cy: y, r: 4, fill: color(series.color), stroke: color("card"), "stroke-width": 1.5 }, this.cursor);
    });
    if (at === null || at < this.from || at > this.to || this.chart.series[0]?.draw === "bars") return;
    const x = this.x(at);
    this.cursor.prepend(svg("line", { x1: x, x2: x, y1: this.top, y2: this.bottom, stroke: color("hover"), "stroke-opacity": 0.35 }));
  }

  /** The lines of the box at the pointer. */
  lines(at) {
    return this.shown.map((series) => {
      const index = this.indexAt(series, at);
      return [series.color, series.label, text(index < 0 ? null : series.y[index], this.chart.format)];
    });
  }
}
