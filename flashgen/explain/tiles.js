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

// What lies around the scores, by the letter of a run's result. A backward pass has the gradients beside what they are gradients of.
const BESIDE = {
  S: {left: ["Q"], above: ["K"], right: [], below: [], scores: "S"},
  O: {left: ["Q"], above: ["K"], right: ["O"], below: ["V"], scores: "S, P"},
  q: {left: ["Q", "o", "O"], above: ["K", "V"], right: ["q"], below: ["k", "v"], scores: "S, P, dS"},
};
const compactName = (tile) => (NAMES[tile[0]] || tile[0]) + tile.slice(1);
const shortName = (tile) => ("LD".includes(tile[0]) ? tileName(tile) : compactName(tile)).replace(",", "\u200a,\u200a");
const heading = (letter, transposed) => (NAMES[letter] || letter) + (transposed ? "ᵀ" : "");

class TileGrid {
  constructor(run) {
    this.run = run;
    this.cells = new Map();
    this.relations = relations(run);
    this.computed = computedCells(run);
    this.selected = null;
    this.detail = element("p", {class: "detail", "aria-live": "polite", text: "Click a tile to see what it needs and what it feeds."});
    const {left, above, right, below, scores} = BESIDE[run.result], count = DATA.problem.tiles, numbers = [...Array(count).keys()];
    this.root = element("div", {class: "grid", role: "group", "aria-label": `Tiles of ${run.title}`});
    for (const [name, many] of [["tiles", count], ["left", left.length], ["right", right.length || 1]])
      this.root.style.setProperty(`--${name}`, many);
    // Grid lines: letters above and left of the scores, a line for headings between, and letters right of and below them.
    const row = above.length + 2, column = left.length + 2, beyond = column + count + 1;
    const columns = [...left.map((letter, n) => [letter, n + 1]), ...right.map((letter, n) => [letter, beyond + n])];
    const rows = [...above.map((letter, n) => [letter, n + 1]), ...below.map((letter, n) => [letter, row + count + n])];
    for (const [letter, at] of rows) {
      this.heading(heading(letter, above.includes(letter)), String(at), String(column - 1));
      numbers.forEach((j) => this.cell(`${letter}${j}`, at, column + j));
    }
    for (const [letter, at] of columns) this.heading(heading(letter, false), String(row - 1), String(at));
    this.heading(scores, String(row - 1), `${column} / span ${count}`);
    for (const i of numbers) {
      for (const [letter, at] of columns) this.cell(`${letter}${i}`, row + i, at);
      numbers.forEach((j) => this.cell(`S${i},${j}`, row + i, column + j));
    }
  }

  heading(text, row, column) {
    const made = element("span", {class: "axis", text});
    made.style.gridRow = row;
    made.style.gridColumn = column;
    this.root.append(made);
  }

  cell(tile, row, column) {
    const button = element("button", {type: "button", class: "tile", "data-tile": tile, onclick: () => this.select(tile)});
    const name = element("span", {class: "name", text: shortName(tile)});
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
    for (const [held, landed] of state.shared) if (cellOf(held) === tile) found.add(landed ? "resident" : "flying");
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
      const times = String(writes).replace(/^0?\.5$|\.5$/, "½");
      let letters = [shown.map(([, letter]) => letter).join(""), writes ? `${times}w` : ""].filter(Boolean).join(" ");
      let words = own.map(([, , text]) => text).concat(writes ? [`written ${times} times so far`] : []);
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
    const given = this.selected && (/^[QKVo]/.test(this.selected) || (this.run.backward && this.selected[0] === "O"));
    const device = given ? "it comes from device memory" : `it needs ${list(needs)}`;
    this.detail.textContent = this.selected ? `${tileName(this.selected)}: ${device}; it feeds ${list(feeds)}.` : none;
  }
}
