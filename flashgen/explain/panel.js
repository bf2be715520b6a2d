// One run beside or below another: its tiles, what happens now, its counters, the statistics of a row, and its source.
"use strict";

const OPERANDS = {
  q: "Q", k: "K", v: "V", S: "S", P: "P", out: "O", running_rows: "O, row_max, row_sum between steps", d_out: "dO", lse: "lse",
  row_lse: "lse in base 2", row_delta: "delta", d_q_sum: "sums of dQ, fp32", d_q: "dQ", d_k: "dK", d_v: "dV",
};
const bytesText = (bytes) => (bytes || 0).toLocaleString("en");

// Tiles of the result that have been written.
const countWrites = (run, state) =>
  Object.entries(state.writes).reduce((sum, [tile, count]) => sum + (tile[0] === run.result ? count : 0), 0);

// Of a backward pass: which keys' gradients the blocks compute, and who adds up dQ.
function whoDoesWhatBackward(run) {
  const gradients = new Map(), adders = new Map(), atomic = run.steps.some((step) => step.kind === "add");
  const [main] = run.launches.map((_, number) => number).filter((number) => run.launches[number].kernel === "gradients");
  for (const step of run.steps.filter((step) => step.launch === main && STORES.has(step.kind))) {
    const [tile] = step.tiles, [to, from, value] = tile[0] === "A" ? [adders, tile, step.block] : [gradients, step.block, tile];
    to.set(from, (to.get(from) || new Set()).add(value));
  }
  const list = (set, name) => [...set].map(name).join(", ");
  const blocks = [...gradients].map(([block, tiles]) => `block ${block}: ${list(tiles, tileName)}`);
  const adding = (of) => `${of.size > 1 ? "blocks" : "block"} ${list(of, String)}`;
  const sums = [...adders].sort().map(([tile, of]) => `${tileName(cellOf(tile))} by ${adding(of)}`);
  const way = atomic ? "atomic additions, in whatever order blocks come" : "read, added to and written back at every step by the one block";
  const each = `Each warp has ${run.block / run.launches[main].warps} keys of a tile.`;
  return `Who computes what: ${blocks.join("; ")}. ${run.consumers.length ? rolesBackward(run) : each} Who adds up dQ: ${sums.join("; ")}: ${way}.`;
}

// The same as roles() of a backward pass.
function rolesBackward(run) {
  const rows = run.block / run.consumers.length, counted = run.consumers.map((_, number) => number).join(" and ");
  return `The producer, one thread of a warp, copies K and V, and Q, lse, dO and delta of one query tile after the other. Each of ` +
    `consumers ${counted}, 4 warps, has ${rows} keys of S, dP, dV and dK, and ${rows} queries of dQ over all keys of the tile: for that it ` +
    `needs dS of both.`;
}

// The warpgroups of a warp-specialised block: which copy, and which compute.
function roles(run) {
  const rows = run.block / run.consumers.length, counted = run.consumers.map((_, number) => number).join(" and ");
  const [copy] = run.steps.filter((step) => step.kind === "copy"), alternate = run.steps.some((step) => step.atom === "bar_sync");
  return `The producer, one thread of warp ${copy.warps}, copies Q, K and V. Each of consumers ${counted}, 4 warps, has ${rows} rows of a ` +
    `tile, ${rows / 4} a warp${alternate ? "; they take turns to issue products, so that one does softmax while the other multiplies" : ""}.`;
}

// Which tiles of the result the blocks compute, and how warps share them.
function whoDoesWhat(run) {
  if (run.backward) return whoDoesWhatBackward(run);
  const of = new Map(), result = run.result === "O" ? "out" : run.result;
  for (const step of run.steps)
    if (step.kind === "store" && step.operand === result) of.set(step.block, (of.get(step.block) || new Set()).add(step.tiles[0]));
  const blocks = [...of].map(([block, tiles]) => `block ${block}: ${[...tiles].map(tileName).join(", ")}`);
  if (run.consumers.length) return `Who computes what: ${blocks.join("; ")}. ${roles(run)}`;
  const rows = run.block / run.launches[run.launches.length - 1].warps;
  return `Who computes what: ${blocks.join("; ")}. Each warp has ${rows} rows of a tile.`;
}

class Panel {
  constructor(run) {
    this.run = run;
    this.grid = new TileGrid(run);
    this.now = element("p", {class: "now", "aria-live": "polite"});
    this.shared = element("p", {class: "shared"});
    this.counters = element("table", {class: "counters"});
    this.rows = element("table", {class: "rows"});
    this.writes = element("p", {class: "writes"});
    this.source = element("div", {class: "source", tabindex: "0", role: "region", "aria-label": `Source of ${run.title}`});
    this.lines = run.source.map((number, i) => element("div", {class: "line", "data-line": i + 1, text: DATA.lines[number] || " "}));
    this.source.append(...this.lines);
    this.marked = [];
    const counted = (count, word) => `${count} ${word}${count === 1 ? "" : "s"}`;
    const blocks = run.launches.map(({kernel, grid, warps, shared}) =>
      `${kernel}: ${counted(grid, "block")} of ${counted(warps, "warp")}, ${bytesText(shared)} B of shared memory each`);
    this.allWrites = countWrites(run, stateAt(run, run.steps.length - 1));
    this.root = element("section", {class: "panel", "data-family": run.family, "aria-label": run.title},
      element("h2", {text: `${run.title}${run.causal ? ", causal" : ""}`}),
      element("p", {class: "config", text: run.config}),
      element("p", {class: "config", text: blocks.join("; ")}),
      this.now,
      element("div", {class: "parts"},
        element("div", {}, this.grid.root, this.grid.detail, this.writes, this.shared,
          element("p", {class: "who", text: whoDoesWhat(run)})),
        element("div", {}, element("h3", {text: "Bytes of device memory"}), this.counters, element("h3", {class: "row-title"}), this.rows),
        element("div", {class: "beside"}, element("h3", {text: "Source, as flashgen show prints it"}), this.source)));
  }

  // Shows the state after `step`, or after the last step of a run that has fewer.
  show(step, row) {
    const last = Math.min(step, this.run.steps.length - 1), state = stateAt(this.run, last);
    this.root.dataset.step = last;
    this.now.textContent = `${last + 1} of ${this.run.steps.length}. ${sentence(this.run, state.step)}`;
    this.now.dataset.kind = state.step.kind;
    this.grid.show(state);
    const held = [...state.shared].map(([tile, landed]) => shortName(tile) + (landed ? "" : " (on its way)"));
    this.shared.textContent = `In shared memory now: ${held.join("; ") || "nothing"}`;
    const written = countWrites(this.run, state);
    const result = NAMES[this.run.result] || this.run.result, verb = this.run.backward ? "written or added to" : "written";
    this.writes.textContent = `Tiles of ${result} ${verb} so far: ${written} of ${this.allWrites} in all`;
    this.root.dataset.writes = written;
    this.showCounters(state, last === this.run.steps.length - 1);
    this.showRow(last, row);
    this.showSource(state.step);
  }

  showCounters(state, atEnd) {
    const cells = (tag, texts) => element("tr", {}, ...texts.map((text, i) => element(i ? tag : "th", i ? {} : {scope: "row"}, text)));
    const {formula} = this.run, ways = formula.added ? ["read", "written", "added"] : ["read", "written"];
    const head = element("tr", {}, ...["", ...ways].map((text) => element("th", {scope: "col", text})));
    const used = Object.keys(OPERANDS).filter((name) => this.run.steps.some((step) => step.operand === name));
    const lines = used.map((name) => cells("td", [OPERANDS[name], ...ways.map((way) => bytesText(state[way][name]))]));
    const counts = ways.map((way) => total(state[way]));
    const same = (count, expected) => `${bytesText(expected)}${atEnd ? (count === expected ? " ✓" : " ✗") : ""}`;
    this.counters.replaceChildren(head, ...lines, cells("td", ["all", ...counts.map(bytesText)]),
      cells("td", ["by the algorithm's loops", ...ways.map((way, i) => same(counts[i], formula[way]))]));
    ways.forEach((way, i) => (this.counters.dataset[way] = counts[i]));
  }

  showRow(last, row) {
    this.root.querySelector(".row-title").textContent = this.run.hasSoftmax ? `Softmax of row ${row}` : "";
    if (!this.run.hasSoftmax) return;
    const found = rowStatistics(this.run, last, row);
    const number = (x) => (x === null ? "hidden" : Number.isFinite(x) ? x.toPrecision(4) : "-∞");
    const headings = ["tile", "its max", "row_max", "factor", "row_sum"].map((text) => element("th", {scope: "col", text}));
    const head = element("tr", {}, ...headings);
    const lines = found.map(({key, tileMax, rowMax, factor, rowSum, summed}) =>
      [`K ${key}`, number(tileMax), number(rowMax), factor === null ? "-" : number(factor), summed ? number(rowSum) : "not yet"]);
    const none = element("tr", {}, element("td", {colspan: "5", text: "no key tile yet"}));
    const body = lines.map((texts) => element("tr", {}, ...texts.map((text) => element("td", {text}))));
    this.rows.replaceChildren(head, ...(body.length ? body : [none]));
  }

  showSource(step) {
    this.marked.forEach((line) => line.classList.remove("current", "called"));
    const of = (numbers) => numbers.map((number) => this.lines[number - 1]).filter(Boolean);
    const kernel = of(step.kernelLines), called = of(step.tileLines);
    kernel.forEach((line) => line.classList.add("current"));
    called.forEach((line) => line.classList.add("called"));
    this.marked = [...kernel, ...called];
    const shown = kernel[kernel.length - 1] || called[0];
    if (shown) this.source.scrollTop = shown.offsetTop - this.source.clientHeight / 3;
  }
}
