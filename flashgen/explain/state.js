// What has happened up to a step of a run: all that the page shows follows from here. Nothing here touches the document.
"use strict";

// A recorded step by the names of its parts.
function decoded(raw) {
  const [launch, block, kind, operand, tiles, needs, read, written, added, warps, call, shared] = raw;
  const [kernelLines, tileLines, operation] = DATA.calls[call];
  const resident = DATA.residents[shared];
  const moved = {read, written, added}, code = {kernelLines, tileLines, operation};
  return {launch, block, kind: DATA.kinds[kind], operand, tiles, needs, ...moved, warps, ...code, resident};
}

// result: the letter of what comes out in the end: O; S where the product is alone; q, for dQ, of a backward pass.
function completed(run) {
  const steps = run.steps.map(decoded), writesOut = steps.some((step) => step.kind === "store" && step.operand === "out");
  const result = run.backward ? "q" : writesOut ? "O" : "S";
  return {...run, steps, result, hasSoftmax: !run.backward && steps.some((step) => step.kind === "reduce")};
}

const RUNS = DATA.runs.map(completed);

// The cell of the grid that stands for a tile: S for P and dS, too, O and dQ for what is kept of them between steps. A small letter is a
// gradient. lse and delta of a backward pass are shown with O, which that pass has no other use for.
const CELLS = {P: "S", s: "S", R: "O", L: "O", A: "q"};
const cellOf = (tile) => (CELLS[tile[0]] || tile[0]) + tile.slice(1);

const MOVES = new Set(["copy", "load"]), STORES = new Set(["store", "add"]);

// Of steps 0 to `last`: bytes, tiles in shared memory, what was computed and written, and the current step's part of it.
function stateAt(run, last) {
  const state = {read: {}, written: {}, added: {}, writes: {}, done: new Set(), loaded: new Set(), stored: new Set(), computed: new Set()};
  state.needed = new Set();
  for (let i = 0; i <= last; i++) {
    const step = run.steps[i];
    for (const way of ["read", "written", "added"])
      if (step[way]) state[way][step.operand] = (state[way][step.operand] || 0) + step[way];
    for (const tile of step.tiles) {
      if (step.kind === "product" || STORES.has(step.kind)) state.done.add(cellOf(tile));
      if (STORES.has(step.kind)) state.writes[cellOf(tile)] = (state.writes[cellOf(tile)] || 0) + 1;
    }
  }
  const step = run.steps[last];
  state.step = step;
  const now = MOVES.has(step.kind) ? state.loaded : STORES.has(step.kind) ? state.stored : state.computed;
  if (step.kind !== "wait" && step.kind !== "stage") step.tiles.forEach((tile) => now.add(cellOf(tile)));
  step.needs.map(cellOf).forEach((tile) => now.has(tile) || state.needed.add(tile));
  state.shared = new Map(step.resident.map((tile) => [tile.replace("~", ""), !tile.endsWith("~")]));
  return state;
}

const total = (counts) => Object.values(counts).reduce((sum, bytes) => sum + bytes, 0);

// What each cell needs, and what it feeds, by the products that the run computed.
function relations(run) {
  const needs = new Map(), feeds = new Map();
  const join = (map, from, to) => map.set(from, (map.get(from) || new Set()).add(to));
  for (const step of run.steps) {
    if (step.kind !== "product") continue;
    for (const tile of step.tiles.map(cellOf))
      for (const needed of step.needs.map(cellOf)) join(needs, tile, needed), join(feeds, needed, tile);
  }
  return {needs, feeds};
}

// The cells of S that the run computes; the mask hides the others.
function computedCells(run) {
  return new Set(run.steps.filter((step) => step.kind === "product").flatMap((step) => step.tiles.map(cellOf)));
}

// The statistics of a row after each of its key tiles up to step `last`, in the recorded order: the maximum at the first reduction over a
// tile, the sum at the one after it. Standard attention has the whole row in registers, so that there is nothing to rescale.
function rowStatistics(run, last, row) {
  const queryTile = Math.floor(row / DATA.problem.block), found = new Map();
  let rowMax = -Infinity, rowSum = 0;
  for (const step of run.steps.slice(0, last + 1)) {
    if (step.kind !== "reduce" || step.operation === "exponentiate") continue;
    for (const tile of step.tiles) {
      const [query, key] = tile.slice(1).split(",").map(Number);
      if (query !== queryTile) continue;
      if (found.has(key)) {
        found.get(key).summed = true;
        continue;
      }
      const [tileMax, tileSum] = DATA.rows[run.mask][row][key] || [null, 0];
      const before = rowMax, rescales = before > -Infinity && step.operation !== "reduce_row";
      if (tileMax !== null) rowMax = Math.max(rowMax, tileMax);
      const factor = before === rowMax ? 1 : Math.exp(before - rowMax);
      rowSum = rowSum * factor + (tileMax === null ? 0 : tileSum * Math.exp(tileMax - rowMax));
      found.set(key, {key, tileMax, rowMax, factor: rescales ? factor : null, rowSum, summed: false});
    }
  }
  return [...found.values()];
}

// The row whose maximum rises most often from key tile to key tile.
function liveliestRow(mask) {
  const rises = (tiles) => {
    let highest = -Infinity, count = 0;
    for (const tile of tiles) if (tile && tile[0] > highest) highest = tile[0], count++;
    return count;
  };
  const counts = DATA.rows[mask].map(rises);
  return counts.lastIndexOf(Math.max(...counts));
}

// The kernel's lines at which a step is.
function codeOf(run, step) {
  return step.kernelLines.map((line) => DATA.lines[run.source[line - 1]]).join("\n");
}

// A sentence that says what happens.
function sentence(run, step) {
  const launch = run.launches[step.launch];
  const names = step.tiles.map(tileName).join(", "), needs = step.needs.map(tileName);
  const kernel = run.launches.length > 1 ? `Kernel ${launch.kernel}, block` : "Block";
  const who = `${kernel} ${step.block} of ${launch.grid}, warps ${step.warps}: `;
  const moved = step.read + step.written + step.added, bytes = moved ? ` (${moved.toLocaleString("en")} B)` : "";
  const reduced = {
    update_row_max: "row_max of ", add_row_sums: "row_sum of ", exponentiate: "P = exp(S - row_max) of ",
    reduce_row: `${codeOf(run, step).includes("Maximum") ? "row_max" : "row_sum"} of `,
  };
  switch (step.kind) {
    case "copy": return `${who}start to copy ${names} from device memory to shared memory${bytes}`;
    case "load": return `${who}read ${names} from device memory to registers${bytes}`;
    case "store": return `${who}write ${names} to device memory${bytes}`;
    case "add": return `${who}add to ${names} in device memory, atomically${bytes}`;
    case "product": {
      const factors = needs.join(" × ");
      if (run.backward) return who + gradientProduct(step);
      // What the warps hold of S in registers is P by then.
      return who + (step.tiles[0][0] === "S" ? `${names} = ${factors}ᵀ` : `${names} += ${factors.replace(/S/g, "P")}`);
    }
    case "reduce":
      if (run.backward) return `${who}delta = rowsum(dO × O) of ${names}`;
      return `${who}${reduced[step.operation] || "a reduction over "}${names}`;
    case "stage": return `${who}put ${names} into shared memory, to write it in whole lines`;
    default: {
      const landed = step.tiles.length ? ` until ${names} ${step.tiles.length > 1 ? "have" : "has"} landed` : "";
      return `${who}wait${landed}; all warps meet`;
    }
  }
}

// A product of a backward pass, by its result. A warp has keys, so that S and dP lie in its registers transposed.
function gradientProduct(step) {
  const [tile] = step.tiles, of = (letter) => tileName(step.needs.find((needed) => needed[0] === letter));
  switch (tile[0]) {
    case "S": return `${tileName(tile)}ᵀ = ${of("K")} × ${of("Q")}ᵀ, then P = exp(scale × S - lse)`;
    case "s": return `dP ${tile.slice(1)}ᵀ = ${of("V")} × ${of("o")}ᵀ, then dS = P × (dP - delta)`;
    case "v": return `${tileName(tile)} += ${of("S").replace("S", "P")}ᵀ × ${of("o")}`;
    case "k": return `${tileName(tile)} += ${of("s")}ᵀ × ${of("Q")}`;
    default: return `${of("s")} × ${of("K")}, this key tile's part of ${tileName(tile)}`;
  }
}

const NAMES = {o: "dO", q: "dQ", k: "dK", v: "dV", s: "dS", A: "sums of dQ", L: "lse and delta"};

function tileName(tile) {
  const index = tile.slice(1);
  return tile[0] === "R" ? `O ${index} with row_max and row_sum` : `${NAMES[tile[0]] || tile[0]} ${index}`;
}
