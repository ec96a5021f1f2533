"use strict";
// The time line: when each phase ran.

class Timeline {
  constructor() {
    this.card = document.getElementById("chart-timeline");
    this.root = svg("svg", { role: "img", "aria-label": "Time line" });
    this.card.appendChild(this.root);
    this.root.addEventListener("pointermove", (event) => this.point(event));
    this.root.addEventListener("pointerdown", (event) => this.point(event));
    this.root.addEventListener("pointerleave", () => { showTip(null, null); hover(null, null); });
  }

  draw() {
    const { phases, spans, slices } = drawing.timeline, lane = 27;
    const height = phases.length * lane + 34;
    this.root.replaceChildren();
    if (!this.root.clientWidth) return; // its section is folded
    this.root.setAttribute("height", height);
    const left = this.left = 74, right = this.right = this.root.clientWidth - 10, bottom = height - 24;
    const x = this.x = (t) => left + (t / drawing.end.t) * (right - left);
    for (const tick of timeTicks(0, drawing.end.t, Math.max(3, (right - left) / 95))) {
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
    showTip(event, hit ? this.says(hit) : null);
    if (view.along === "t") hover("run", t);
  }

  says([phase, stage, start, end]) {
    const known = drawing.boundaries.some((bound) => bound.stage === stage);
    return `${drawing.timeline.phases[phase]} · ${known ? `stage ${stage}` : "outside the stages"} · ${clock(end - start)} from ${clock(start)}`;
  }

  showAt(at) {
    const shown = at !== null && view.along === "t";
    this.cursor?.setAttribute("visibility", shown ? "visible" : "hidden");
    if (shown && this.cursor) for (const key of ["x1", "x2"]) this.cursor.setAttribute(key, this.x(at));
  }
}
