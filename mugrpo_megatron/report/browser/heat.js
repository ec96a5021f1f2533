"use strict";
// The heat map: a response's tokens over the ages of its stage, coloured by ratio; and the response to read at one age.

const LABELS = 46, ROW = 15; // pixels of the ages' labels and of a row
const SHORT = 9; // tokens of responses that have room side by side
const NAMED = 30; // pixels of a column that has room for its token
const TURN = 48; // pixels that "turn 2" takes
const TOOL = "color-mix(in oklab, var(--faint) 50%, var(--card))"; // the colour of what a tool wrote

/** A panel for every response of the map; returns them, to be drawn again with the page. */
function heatMap(card, map) {
  const scale = card.querySelector(".scale");
  scale.replaceChildren();
  const swatch = (color, name) => {
    const item = document.createElement("span"), field = document.createElement("i");
    field.style.background = color;
    item.append(field, name);
    scale.appendChild(item);
  };
  for (const power of [-6, -4, -3, -2, -1, 0, 1]) {
    swatch(shade(power), power ? `10${power < 0 ? "⁻" : ""}${"⁰¹²³⁴⁵⁶"[Math.abs(power)]}` : "1");
  }
  if (map.responses.some((response) => response.turns.length)) swatch(TOOL, "a tool's");
  const place = card.querySelector(".responses");
  place.replaceChildren();
  if (map.responses.every((response) => response.tokens.length <= SHORT)) place.classList.add("short");
  return map.responses.map((response) => new HeatGrid(place, map, response));
}

/** The colour of a ratio 10^power: as the card at 1, red below, blue above. */
function shade(power) {
  const part = Math.min(1, (Math.abs(power) / (power < 0 ? 5 : 1.5)) ** 0.6);
  return `color-mix(in oklab, var(--${power < 0 ? "red" : "blue"}) ${Math.round(100 * part)}%, var(--cell))`;
}

class HeatGrid {
  constructor(parent, map, response) {
    this.map = map;
    this.response = response;
    this.age = response.ages.length - 1; // row that the text below is coloured by
    const whole = document.createElement("section"), title = document.createElement("p");
    title.className = "score";
    const fact = (text) => { const node = document.createElement("span"); node.textContent = text; title.appendChild(node); };
    fact(`stage ${response.stage}`);
    fact(response.problem);
    fact(`reward ${number(response.reward)}`);
    fact(response.tokens.length < response.length ? `tokens ${response.start} to ${response.start + response.tokens.length - 1} of ${response.length}` : `${response.length} tokens`);
    if (response.turns.length) fact(response.tokens.length < response.length ? `turns ${response.turns[0][1]} to ${response.turns.at(-1)[1]}` : `${response.turns.length} turns`);
    fact(`trained on in update ${response.update} of the stage`);
    this.root = svg("svg", { role: "img", "aria-label": "Ratios of the tokens by age" });
    this.text = document.createElement("p");
    this.text.className = "tokens";
    whole.append(title, this.root, this.text);
    parent.appendChild(whole);
    this.root.addEventListener("pointermove", (event) => this.point(event));
    this.root.addEventListener("pointerdown", (event) => this.point(event));
    this.root.addEventListener("pointerleave", () => showTip(null, null));
  }

  isTool(column) { return this.response.cells[0][column] === "."; }

  color(row, column) { return this.isTool(column) ? TOOL : shade(this.power(row, column)); }

  power(row, column) { return this.map.levels.indexOf(this.response.cells[row][column]) / this.map.steps + this.map.lowest; }

  isDropped(row, column) { return this.response.dropped[row].some(([first, last]) => first <= column && column <= last); }

  draw() {
    const { root, response } = this, count = response.tokens.length, rows = response.ages.length;
    root.replaceChildren();
    if (!root.clientWidth) return; // its section is folded
    const width = Math.min(64, (root.clientWidth - LABELS - 2) / count);
    this.width = width;
    const above = response.turns.length ? 14 : 0; // pixels of the turns' names
    const head = this.head = above + (width >= NAMED ? 18 : 4);
    root.setAttribute("height", head + rows * ROW + 6);
    let free = 0;
    for (const [first, turn] of response.turns) {
      const x = LABELS + first * width - (width > 5 ? 0.5 : 0);
      if (first) svg("line", { x1: x, x2: x, y1: 2, y2: head + rows * ROW + 1, class: "turn" }, root);
      if (x < free) continue;
      svg("text", { x: x + (first ? 4 : 0), y: 11 }, root).textContent = `turn ${turn}`;
      free = x + TURN;
    }
    if (width >= NAMED) {
      response.tokens.forEach((token, k) => {
        const most = Math.floor(width / 7);
        const shown = token.length > most ? `${token.slice(0, Math.max(most - 1, 1))}…` : token;
        svg("text", { x: LABELS + (k + 0.5) * width, y: above + 12, "text-anchor": "middle", class: "unit" }, root).textContent = shown;
      });
    }
    response.ages.forEach((age, row) => {
      const y = head + row * ROW;
      svg("text", { x: LABELS - 7, y: y + 11, "text-anchor": "end" }, root).textContent = row ? String(age) : "age 0";
      for (let k = 0; k < count; k++) {
        svg("rect", { x: LABELS + k * width, y, width: Math.max(width - (width > 5 ? 1 : 0), 0.8), height: ROW - 1, style: `fill:${this.color(row, k)}` }, root);
      }
      for (const [first, last] of response.dropped[row]) {
        svg("line", { x1: LABELS + first * width, x2: LABELS + (last + 1) * width - 1, y1: y + ROW / 2, y2: y + ROW / 2, class: "dropped" }, root);
      }
      for (const k of response.triggers[row]) {
        svg("circle", { cx: LABELS + (k + 0.5) * width, cy: y + ROW / 2 - 0.5, r: Math.min(4.5, Math.max(width / 2, 2)), class: "trigger" }, root);
      }
    });
    this.mark = svg("rect", { x: LABELS - 1, width: count * width + 1, height: ROW, class: "mark" }, root);
    this.read(this.age);
  }

  /** Show the response as it stands at one age. */
  read(row) {
    this.age = row;
    this.mark.setAttribute("y", this.head + row * ROW - 0.5);
    const label = document.createElement("b");
    label.textContent = `age ${this.response.ages[row]}`;
    this.text.replaceChildren(label, ...this.response.tokens.map((token, k) => {
      const node = document.createElement("span");
      node.textContent = token;
      node.style.background = this.color(row, k);
      if (this.isTool(k)) node.classList.add("tool");
      if (this.isDropped(row, k)) node.classList.add("dropped");
      if (this.response.triggers[row].includes(k)) node.classList.add("trigger");
      return node;
    }));
  }

  point(event) {
    const frame = this.root.getBoundingClientRect();
    const column = Math.floor((event.clientX - frame.left - LABELS) / this.width);
    const row = Math.floor((event.clientY - frame.top - this.head) / ROW);
    const inside = row >= 0 && row < this.response.ages.length;
    if (inside && row !== this.age) this.read(row);
    if (!inside || column < 0 || column >= this.response.tokens.length) return showTip(null, null);
    const state = [
      ...(this.response.triggers[row].includes(column) ? ["trigger"] : []),
      ...(this.isDropped(row, column) ? ["dropped"] : []),
    ];
    if (this.isTool(column)) return showTip(event, `${this.response.tokens[column]} · a tool's, not sampled`);
    showTip(event, [`${this.response.tokens[column]} · ratio ≈ ${number(+(10 ** this.power(row, column)).toPrecision(2))} at age ${this.response.ages[row]}`, ...state].join(" · "));
  }
}
