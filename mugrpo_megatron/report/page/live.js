"use strict";
// A page that is served while its run goes on: it asks for itself again and takes over what is new.

const parts = [".title", ".facts", ".tiles", "#warnings", "#stages", "#events", "#numbers", "footer"];
const shape = (one) => JSON.stringify([one.charts.map((chart) => chart.id), one.timeline.phases, Boolean(one.heat)]);

async function refresh() {
  let next;
  try {
    const reply = await fetch("/");
    if (!reply.ok) return;
    next = new DOMParser().parseFromString(await reply.text(), "text/html");
  } catch {
    return; // the server has ended: the page stays as it is
  }
  const data = JSON.parse(next.getElementById("drawing").textContent);
  if (shape(data) !== shape(drawing)) return location.reload(); // a panel has its first value
  for (const part of parts) {
    const [old, fresh] = [document.querySelector(part), next.querySelector(part)];
    if (old && fresh) old.replaceWith(fresh);
  }
  const [samples, newer] = [document, next].map((page) => page.getElementById("samples"));
  if (samples && newer && samples.textContent !== newer.textContent) samples.replaceWith(newer);
  restingText = where.textContent = next.querySelector(".where").textContent;
  Object.assign(drawing, data);
  if (drawing.heat) grids = heatMap(document.getElementById("heat"), drawing.heat);
  panels.forEach((panel, i) => panel.take(drawing.charts[i]));
  drawAll();
}

const everySeconds = Number(document.body.dataset.live);
if (everySeconds) setInterval(refresh, 1000 * everySeconds);
