window.addEventListener("error", (event) => note("error", event.message));
const notes = {};
function note(name, value) { notes[name] = value; }
function pointer(panel, kind, share) {
  const box = panel.root.getBoundingClientRect(), x = panel.left + share * (panel.right - panel.left);
  const place = { clientX: box.left + x, clientY: box.top + 40, button: 0, pointerType: "mouse", bubbles: true };
  panel.root.dispatchEvent(new PointerEvent(kind, place));
}
const first = panels[0], marks = (panel) => panel.plot.querySelectorAll("path").length;
const labels = (panel) => [...panel.root.querySelectorAll("text")].map((node) => node.textContent);
note("curves", marks(first));
first.legend.querySelector("button").click();
note("curves without one", marks(first));
first.legend.querySelector("button").click();
note("curves again", marks(first));
pointer(first, "pointermove", 0.5);
note("box", tip.textContent);
note("box is shown", !tip.hidden);
pointer(first, "pointerdown", 0.25);
pointer(first, "pointermove", 0.5);
pointer(first, "pointerup", 0.5);
note("zoomed", [first.from, first.to]);
const others = panels.filter((panel) => panel.axis === "u");
note("others zoomed", others.every((panel) => panel.from === first.from && panel.to === first.to));
note("by age is not", panels.filter((panel) => panel.axis === "age").every((panel) => panel.from === 0));
first.root.dispatchEvent(new MouseEvent("dblclick"));
note("all of it", [first.from, first.to]);
const linear = labels(panels[3]).join();
panels[3].card.querySelector(".tools button").click();
note("another axis", labels(panels[3]).join() !== linear);
document.body.insertAdjacentHTML("beforeend", "<pre id=notes></pre>");
document.getElementById("notes").textContent = JSON.stringify(notes);
