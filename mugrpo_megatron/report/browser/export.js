"use strict";
// A panel as a file: its values (CSV) and its picture (PNG).

function save(name, blob) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name;
  link.click();
  URL.revokeObjectURL(link.href);
}

/** One line for each point: its series, its place (updates and seconds, or the panel's own abscissa) and its value with its band. */
function csvOf(chart) {
  const cell = (value) => (value === null || value === undefined ? "" : typeof value === "string" ? `"${value.replaceAll('"', '""')}"` : value);
  const rows = [chart.along === "run" ? "series,update,seconds,value,low,high" : `series,${chart.along},value,low,high`];
  for (const series of chart.series) {
    const axis = drawing.axes[series.axis];
    series.y.forEach((y, i) => {
      const place = chart.along === "run" ? [axis.u[i], axis.t[i]] : [axis.u[i]];
      rows.push([series.label, ...place, y, series.low && series.low[i], series.high && series.high[i]].map(cell).join(","));
    });
  }
  return `${rows.join("\n")}\n`;
}

function saveCsv(panel) {
  save(`${panel.chart.id}.csv`, new Blob([csvOf(panel.chart)], { type: "text/csv" }));
}

/** The panel's SVG on its own: title and legend in it, colours and fonts written out. */
function standAlone(panel) {
  const style = getComputedStyle(document.documentElement), head = 44;
  const height = panel.root.clientHeight + head, copy = panel.root.cloneNode(true);
  const inks = { unit: "--soft" };
  copy.querySelectorAll("text").forEach((node) => {
    node.setAttribute("font-size", "11.5");
    node.setAttribute("fill", `var(${inks[node.getAttribute("class")] || "--faint"})`);
  });
  const inner = svg("g", { transform: `translate(12,${head})` });
  inner.append(...copy.childNodes);
  const whole = svg("svg", { xmlns: SVG, width: panel.width + 24, height: height + 8, "font-family": "system-ui, sans-serif" });
  svg("rect", { width: "100%", height: "100%", fill: "var(--card)" }, whole);
  svg("text", { x: 12, y: 20, "font-size": 14, "font-weight": 600, fill: "var(--ink)" }, whole).textContent = panel.chart.title;
  const legend = svg("text", { x: 12, y: 37, "font-size": 12 }, whole);
  for (const series of panel.shown) {
    svg("tspan", { fill: color(series.color) }, legend).textContent = "■ ";
    svg("tspan", { fill: "var(--soft)" }, legend).textContent = `${series.label}    `;
  }
  whole.appendChild(inner);
  return new XMLSerializer().serializeToString(whole).replace(/var\((--[\w-]+)\)/g, (_, name) => style.getPropertyValue(name).trim());
}

function savePng(panel) {
  const image = new Image();
  image.onload = () => {
    const canvas = document.createElement("canvas");
    canvas.width = 2 * image.width;
    canvas.height = 2 * image.height;
    canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
    canvas.toBlob((blob) => save(`${panel.chart.id}.png`, blob));
  };
  image.src = `data:image/svg+xml,${encodeURIComponent(standAlone(panel))}`;
}
