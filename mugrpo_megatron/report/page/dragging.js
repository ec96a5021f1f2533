"use strict";
// The pointer on a panel: values where it is, zooming by dragging, and the box with the values.

const tip = document.createElement("div");
tip.className = "tip";
tip.hidden = true;
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

class Dragging {
  constructor(panel) {
    this.panel = panel;
    this.begin = null; // pixel at which the pointer went down
    const on = (name, act) => panel.root.addEventListener(name, act);
    on("pointerdown", (event) => { if (event.button === 0 && event.pointerType === "mouse") this.begin = event.clientX; this.move(event); });
    on("pointermove", (event) => this.move(event));
    on("pointerup", (event) => this.end(event));
    on("pointerleave", () => { this.begin = null; showTip(null, null); hover(null, null); });
    on("dblclick", () => zoom(panel.axis, null));
  }

  move(event) {
    const { panel } = this, at = panel.valueAt(event.clientX);
    hover(panel.chart.along, at);
    if (event.pointerType === "mouse") showTip(event, this.box(at));
    if (!this.dragged(event)) return;
    const [from, to] = [this.begin, event.clientX].map((pixel) => panel.x(panel.valueAt(pixel))).sort((a, b) => a - b);
    svg("rect", { x: from, width: to - from, y: panel.top, height: panel.bottom - panel.top, fill: color("accent"), "fill-opacity": 0.14 }, panel.cursor);
  }

  end(event) {
    if (this.dragged(event)) {
      const [from, to] = [this.begin, event.clientX].map((pixel) => this.panel.valueAt(pixel)).sort((a, b) => a - b);
      if (to > from) zoom(this.panel.axis, [from, to]);
    }
    this.begin = null;
  }

  dragged(event) { return this.begin !== null && Math.abs(event.clientX - this.begin) > 6; }

  box(at) {
    const head = document.createElement("div");
    head.textContent = placeText(this.panel.chart.along, at);
    return [head, ...this.panel.lines(at).map(([hue, label, value]) => {
      const row = document.createElement("div"), swatch = document.createElement("i"), shown = document.createElement("b");
      swatch.style.background = color(hue);
      shown.textContent = value;
      row.append(swatch, label, shown);
      return row;
    })];
  }
}
