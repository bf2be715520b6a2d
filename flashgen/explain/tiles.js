// The grids of tiles of one run: Q, K, S, V and O as buttons, and what each shows of a state.
"use strict";

// What a cell is, in the order in which letters come: its class, its letter, and the words of its text alternative.
const MARKS = [
  ["loaded", "L", "read from device memory now"],
  ["stored", "W", "written to device memory now"],
  ["computed", "C", "computed now"],
  ["needed", "n", "needed now"],
  ["flying", "f", "on its way to shared memory"],
  ["resident", "s", "in shared memory"],
  ["done", "d", "done before"],
  ["skipped", "×", "skipped: no block computes it"],
];

class TileGrid {
  constructor(run) {
    this.run = run;
    this.cells = new Map();
    this.relations = relations(run);
    this.computed = computedCells(run);
    this.selected = null;
    this.detail = element("p", {class: "detail", "aria-live": "polite", text: "Click a tile to see what it needs and what it feeds."});
    const count = DATA.problem.tiles;
    this.root = element("div", {class: "grid", role: "group", "aria-label": `Tiles of ${run.title}`});
    this.root.style.setProperty("--tiles", count);
    const numbers = [...Array(count).keys()];
    this.heading("Kᵀ", "1", "2");
    numbers.forEach((j) => this.cell(`K${j}`, 1, j + 3));
    this.heading("Q", "2", "1");
    this.heading("O", "2", String(count + 4));
    this.heading("S, P", "2", `3 / span ${count}`);
    for (const i of numbers) {
      this.cell(`Q${i}`, i + 3, 1);
      numbers.forEach((j) => this.cell(`S${i},${j}`, i + 3, j + 3));
      this.cell(`O${i}`, i + 3, count + 4);
    }
    this.heading("V", String(count + 3), "2");
    numbers.forEach((j) => this.cell(`V${j}`, count + 3, j + 3));
  }

  heading(text, row, column) {
    const made = element("span", {class: "axis", text});
    made.style.gridRow = row;
    made.style.gridColumn = column;
    this.root.append(made);
  }

  cell(tile, row, column) {
    const button = element("button", {type: "button", class: "tile", "data-tile": tile, onclick: () => this.select(tile)});
    const name = element("span", {class: "name", text: tile.replace(",", "\u200a,\u200a")});
    const marks = element("span", {class: "marks"});
    button.append(name, marks);
    button.style.gridRow = row;
    button.style.gridColumn = column;
    this.cells.set(tile, {button, marks});
    this.root.append(button);
  }

  select(tile) {
    this.selected = this.selected === tile ? null : tile;
    if (this.state) this.show(this.state);
  }

  // The marks of a cell in a state.
  marksOf(tile, state) {
    const found = new Set();
    for (const name of ["loaded", "stored", "computed", "needed", "done"]) if (state[name].has(tile)) found.add(name);
    for (const held of [tile, tile.replace("S", "P")])
      if (state.shared.has(held)) found.add(state.shared.get(held) ? "resident" : "flying");
    if (tile[0] === "S" && !this.computed.has(tile)) found.add("skipped");
    return found;
  }

  show(state) {
    this.state = state;
    const needs = this.relations.needs.get(this.selected) || new Set(), feeds = this.relations.feeds.get(this.selected) || new Set();
    for (const [tile, {button, marks}] of this.cells) {
      const found = this.marksOf(tile, state);
      const own = MARKS.filter(([name]) => found.has(name));
      const writes = state.writes[tile] || 0;
      const shown = found.size > 1 || writes ? own.filter(([name]) => name !== "done") : own; // any of the others says as much
      const classes = ["tile", ...own.map(([name]) => name)];
      let letters = [shown.map(([, letter]) => letter).join(""), writes ? `${writes}w` : ""].filter(Boolean).join(" ");
      let words = own.map(([, , text]) => text).concat(writes ? [`written ${writes} times so far`] : []);
      for (const [set, name, arrow, text] of [[needs, "needs", "←", "the selected tile needs it"], [feeds, "feeds", "→", "fed by it"]])
        if (set.has(tile)) classes.push(name), letters = arrow + letters, words = [...words, text];
      if (tile === this.selected) classes.push("selected"), words = ["selected", ...words];
      button.className = classes.join(" ");
      marks.textContent = letters;
      button.setAttribute("aria-label", `${tileName(tile)}: ${words.join("; ") || "in device memory"}`);
      button.setAttribute("aria-pressed", String(tile === this.selected));
    }
    const list = (set) => [...set].map(tileName).join(", ") || "nothing";
    const none = "Click a tile to see what it needs and what it feeds.";
    const device = this.selected && /^[QKV]/.test(this.selected) ? "it comes from device memory" : `it needs ${list(needs)}`;
    this.detail.textContent = this.selected ? `${tileName(this.selected)}: ${device}; it feeds ${list(feeds)}.` : none;
  }
}
