"use strict";
// A page that is served while its run goes on: it asks for itself again and takes over what is new.

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
  for (const old of document.querySelectorAll(".part")) {
    const fresh = next.getElementById(old.id);
    if (fresh && fresh.textContent !== old.textContent) old.replaceWith(fresh);
  }
  restingText = where.textContent = next.querySelector(".where").textContent;
  Object.assign(drawing, data);
  if (drawing.heat) grids = heatMap(document.getElementById("heat"), drawing.heat);
  panels.forEach((panel, i) => panel.take(drawing.charts[i]));
  drawAll();
}

/** The age of the run's last row, which grows between two looks. */
function tick() {
  const node = document.querySelector(".status [data-age]"), age = node ? Number(node.dataset.age++) : 0;
  if (node) node.textContent = `${age < 60 ? `${age} s` : clock(age)} ago`;
}

const everySeconds = Number(document.body.dataset.live);
if (everySeconds) {
  tick();
  setInterval(tick, 1000);
  setInterval(refresh, 1000 * everySeconds);
}
