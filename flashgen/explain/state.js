// What has happened up to a step of a run: all that the page shows follows from here. Nothing here touches the document.
"use strict";

// A recorded step by the names of its parts.
function decoded(raw) {
  const [launch, block, kind, operand, tiles, needs, read, written, warps, call, shared] = raw;
  const [kernelLines, tileLines, operation] = DATA.calls[call];
  const resident = DATA.residents[shared];
  return {launch, block, kind: DATA.kinds[kind], operand, tiles, needs, read, written, warps, kernelLines, tileLines, operation, resident};
}

const RUNS = DATA.runs.map((run) => ({...run, steps: run.steps.map(decoded)}));

// The cell of the grid that stands for a tile: S for P, too, and O for what is kept of it between steps.
function cellOf(tile) {
  return tile.replace(/^P/, "S").replace(/^R/, "O");
}

const MOVES = new Set(["copy", "load"]);

// Of steps 0 to `last`: bytes, tiles in shared memory, what was computed and written, and the current step's part of it.
function stateAt(run, last) {
  const state = {read: {}, written: {}, writes: {}, done: new Set(), loaded: new Set(), stored: new Set(), computed: new Set()};
  state.needed = new Set();
  for (let i = 0; i <= last; i++) {
    const step = run.steps[i];
    if (step.read) state.read[step.operand] = (state.read[step.operand] || 0) + step.read;
    if (step.written) state.written[step.operand] = (state.written[step.operand] || 0) + step.written;
    for (const tile of step.tiles) {
      if (step.kind === "product" || step.kind === "store") state.done.add(cellOf(tile));
      if (step.kind === "store") state.writes[cellOf(tile)] = (state.writes[cellOf(tile)] || 0) + 1;
    }
  }
  const step = run.steps[last];
  state.step = step;
  const now = MOVES.has(step.kind) ? state.loaded : step.kind === "store" ? state.stored : state.computed;
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
  return new Set(run.steps.filter((step) => step.kind === "product").flatMap((step) => step.tiles));
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
  const bytes = step.read + step.written ? ` (${(step.read + step.written).toLocaleString("en")} B)` : "";
  const reduced = {
    update_row_max: "row_max of ", add_row_sums: "row_sum of ", exponentiate: "P = exp(S - row_max) of ",
    reduce_row: `${codeOf(run, step).includes("Maximum") ? "row_max" : "row_sum"} of `,
  };
  switch (step.kind) {
    case "copy": return `${who}start to copy ${names} from device memory to shared memory${bytes}`;
    case "load": return `${who}read ${names} from device memory to registers${bytes}`;
    case "store": return `${who}write ${names} to device memory${bytes}`;
    case "product": {
      const factors = needs.join(" × ");
      // What the warps hold of S in registers is P by then.
      return who + (step.tiles[0][0] === "S" ? `${names} = ${factors}ᵀ` : `${names} += ${factors.replace(/S/g, "P")}`);
    }
    case "reduce": return `${who}${reduced[step.operation] || "a reduction over "}${names}`;
    case "stage": return `${who}put ${names} into shared memory, to write it in whole lines`;
    default: {
      const landed = step.tiles.length ? ` until ${names} ${step.tiles.length > 1 ? "have" : "has"} landed` : "";
      return `${who}wait${landed}; all warps meet`;
    }
  }
}

function tileName(tile) {
  const index = tile.slice(1);
  return tile[0] === "R" ? `O ${index} with row_max and row_sum` : `${tile[0]} ${index}`;
}
