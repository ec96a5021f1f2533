"use strict";
// The page: where the pointer is, zooming, folding, and drawing everything.

const where = document.querySelector(".where");
const restingText = where.textContent;
const unzoom = document.querySelector(".unzoom");
let timeline = null;
let grids = [];

/** A place on the abscissa in words. */
function placeText(along, at) {
  if (along === "age") return `age ${Math.round(at)}`;
  if (along === "length") return `${Math.round(at).toLocaleString("en")} tokens`;
  if (along === "reward") return `reward ${number(at)}`;
  const bound = drawing.boundaries.findLast((one) => one[view.along] <= at + 1e-9);
  return `${bound ? `stage ${bound.stage} · ` : ""}${view.along === "u" ? `update ${Math.round(at).toLocaleString("en")}` : clock(at)}`;
}

/** Mark a place on every panel that has this abscissa; null ends it. */
function hover(along, at) {
  for (const panel of panels) panel.showValues(panel.chart.along === along ? at : null);
  if (timeline) timeline.showAt(along === "run" ? at : null);
  where.textContent = at === null ? restingText : placeText(along, at);
}

/** Show only `range` of an abscissa, on every panel that has it; null shows all of it. */
function zoom(axis, range) {
  view.range[axis] = range;
  unzoom.hidden = Object.values(view.range).every((one) => one === null);
  showTip(null, null);
  drawAll();
}

function drawAll() {
  for (const one of [...panels, ...grids, ...(timeline ? [timeline] : [])]) one.draw();
}

for (const chart of drawing.charts) panels.push(new Panel(chart));
if (drawing.timeline.phases.length) timeline = new Timeline();
if (drawing.heat) grids = heatMap(document.getElementById("heat"), drawing.heat);
for (const button of document.querySelectorAll(".switch button")) {
  button.addEventListener("click", () => {
    view.along = button.dataset.along;
    for (const other of document.querySelectorAll(".switch button")) other.setAttribute("aria-pressed", String(other === button));
    drawAll();
  });
}
unzoom.addEventListener("click", () => { for (const axis of Object.keys(view.range)) zoom(axis, null); });
document.addEventListener("toggle", (event) => { if (event.target.matches("details.section")) drawAll(); }, true);

const links = new Map([...document.querySelectorAll("nav a")].map((link) => [link.hash.slice(1), link]));
for (const [id, link] of links) link.addEventListener("click", () => { const section = document.getElementById(id); if ("open" in section) section.open = true; });
const inSight = new IntersectionObserver((entries) => {
  for (const { target, isIntersecting } of entries) links.get(target.id).classList.toggle("here", isIntersecting);
}, { rootMargin: "-90px 0px -70% 0px" });
for (const id of links.keys()) inSight.observe(document.getElementById(id));

let drawnWidth = document.body.clientWidth;
drawAll();
new ResizeObserver(() => {
  if (document.body.clientWidth === drawnWidth) return;
  drawnWidth = document.body.clientWidth;
  drawAll();
}).observe(document.body);
