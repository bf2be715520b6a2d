// What has happened up to a step of a run: all that the page shows follows from here. Nothing here touches the document.
"use strict";

const MOVES = new Set(["copy", "load"]), STORES = new Set(["store", "add"]), UNMARKED = new Set(["wait", "stage", "release"]);

// A recorded step by the names of its parts.
function decoded(raw) {
  const [code, block, subject, shared] = raw, [tiles, needs, bytes] = DATA.subjects[subject];
  const names = (text) => text.split(" ").filter(Boolean);
  const [number, operand, warps, launch, kernelLines, tileLines, operation, atom] = DATA.codes[code];
  const kind = DATA.kinds[number], resident = names(DATA.residents[shared]), warpgroup = Math.floor(parseInt(warps) / 4);
  const moved = {read: MOVES.has(kind) ? bytes : 0, written: kind === "store" ? bytes : 0, added: kind === "add" ? bytes : 0};
  const what = {kind, operand, tiles: names(tiles), needs: names(needs), ...moved, resident};
  return {launch, block, warps, warpgroup, kernelLines, tileLines, operation, atom, ...what};
}

// result: the letter of what comes out in the end: O; S where the product is alone; q, for dQ, of a backward pass. consumers: warpgroups of
// a warp-specialised kernel that compute; none elsewhere. specialised: the number of that kernel's launch.
function completed(run) {
  const steps = run.steps.map(decoded), writesOut = steps.some((step) => step.kind === "store" && step.operand === "out");
  const result = run.backward ? "q" : writesOut ? "O" : "S";
  const multiplying = steps.filter((step) => step.atom.startsWith("wgmma_"));
  const consumers = [...new Set(multiplying.map((step) => step.warpgroup))].sort(), [specialised] = multiplying.map((step) => step.launch);
  const hasSoftmax = !run.backward && steps.some((step) => step.kind === "reduce");
  return {...run, steps, result, consumers, specialised, hasSoftmax};
}

const RUNS = DATA.runs.map(completed);

// The cell of the grid that stands for a tile: S for P and dS, too, O and dQ for what is kept of them between steps. A small letter is a
// gradient. lse and delta of a backward pass are shown with O, which that pass has no other use for.
const CELLS = {P: "S", s: "S", R: "O", L: "O", D: "O", A: "q"};
const cellOf = (tile) => (CELLS[tile[0]] || tile[0]) + tile.slice(1);

// Whether roles do a step, each its own.
const isOfRole = (run, step) => step.launch === run.specialised && step.atom !== "barrier_sync";

// Of steps 0 to `last`: bytes, tiles in shared memory, what was computed and written, and the current step's part of it.
function stateAt(run, last) {
  const state = {read: {}, written: {}, added: {}, writes: {}, done: new Set(), loaded: new Set(), stored: new Set(), computed: new Set()};
  state.needed = new Set();
  for (let i = 0; i <= last; i++) {
    const step = run.steps[i];
    for (const way of ["read", "written", "added"])
      if (step[way]) state[way][step.operand] = (state[way][step.operand] || 0) + step[way];
    for (const cell of step.tiles.map(cellOf)) {
      if (step.kind === "product" || STORES.has(step.kind)) state.done.add(cell);
      if (STORES.has(step.kind)) state.writes[cell] = (state.writes[cell] || 0) + (isOfRole(run, step) ? 1 / run.consumers.length : 1);
    }
  }
  const step = run.steps[last];
  state.step = step;
  const now = MOVES.has(step.kind) ? state.loaded : STORES.has(step.kind) ? state.stored : state.computed;
  if (!UNMARKED.has(step.kind)) step.tiles.forEach((tile) => now.add(cellOf(tile)));
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

// Of each row of a run and each key tile: the maximum, and the sum of exponentials relative to it.
function rowsOf(run) {
  const seen = (row, tile, key) => [tile, DATA.edges[run.block][row], null][1 + Math.sign(key - Math.floor(row / run.block))];
  const all = DATA.rows[run.block];
  return run.causal ? all.map((tiles, row) => tiles.map((tile, key) => seen(row, tile, key))) : all;
}

// The statistics of a row after each of its key tiles up to step `last`, in the recorded order: the maximum at the first reduction over a
// tile, the sum at the one after it. Standard attention has the whole row in registers, so that there is nothing to rescale. With
// conditional rescaling the maxima of a warp's rows rise only where one of them would by more than `headroom` in base 2. Consumers have the
// rows of a tile in turn, and add up the sums of their lanes once, in the end.
function rowStatistics(run, last, row) {
  const queryTile = Math.floor(row / run.block), found = new Map(), {consumers, headroom} = run;
  const owner = consumers[Math.floor((row % run.block) / run.block * consumers.length)];
  const first = headroom ? row - row % 16 : row, together = rowsOf(run).slice(first, headroom ? first + 16 : row + 1);
  let rowMax = -Infinity, rowSum = 0, maxima = together.map(() => -Infinity);
  for (const step of run.steps.slice(0, last + 1)) {
    if (step.kind !== "reduce" || step.operation === "exponentiate" || (consumers.length && step.warpgroup !== owner)) continue;
    for (const tile of step.tiles) {
      const [query, key] = tile.slice(1).split(",").map(Number);
      if (query !== queryTile) continue;
      if (step.operation === "finish") {
        found.forEach((each) => (each.summed = true));
        continue;
      }
      if (found.has(key)) {
        found.get(key).summed = true;
        continue;
      }
      const [tileMax, tileSum] = together[row - first][key] || [null, 0];
      const before = rowMax, rescales = before > -Infinity && step.operation !== "reduce_row";
      const risen = together.map((tiles, i) => Math.max(maxima[i], tiles[key] ? tiles[key][0] : -Infinity));
      if (risen.some((x, i) => (x - maxima[i]) * Math.LOG2E > headroom)) maxima = risen;
      rowMax = maxima[row - first];
      const factor = before === rowMax ? 1 : Math.exp(before - rowMax);
      rowSum = rowSum * factor + (tileMax === null ? 0 : tileSum * Math.exp(tileMax - rowMax));
      found.set(key, {key, tileMax, rowMax, factor: rescales ? factor : null, rowSum, summed: false});
    }
  }
  return [...found.values()];
}

// The row whose maximum rises most often from key tile to key tile.
function liveliestRow(run) {
  const rises = (tiles) => {
    let highest = -Infinity, count = 0;
    for (const tile of tiles) if (tile && tile[0] > highest) highest = tile[0], count++;
    return count;
  };
  const counts = rowsOf(run).map(rises);
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
  const who = `${kernel} ${step.block} of ${launch.grid}, ${whoseStep(run, step)}: `;
  const moved = step.read + step.written + step.added, bytes = moved ? ` (${moved.toLocaleString("en")} B)` : "";
  const reduced = {
    exp2_and_sum: "row_max, then P = exp(S - row_max) and each lane's part of row_sum, of ", finish: "row_sum, over the lanes of a row, of ",
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
      if (run.backward) return who + gradientProduct(run, step);
      if (!step.tiles.length) return `${who}a product of rows beyond the last query`;
      // What the warps hold of S in registers is P by then.
      const rows = run.consumers.length ? `, for its ${run.block / run.consumers.length} rows` : "";
      return who + (step.tiles[0][0] === "S" ? `${names} = ${factors}ᵀ` : `${names} += ${factors.replace(/S/g, "P")}`) + rows;
    }
    case "reduce":
      if (run.backward) return `${who}${names} = rowsum(dO × O)`;
      return `${who}${reduced[step.operation] || "a reduction over "}${names}`;
    case "stage": return `${who}put ${names || "zeros"} into shared memory, ${names.startsWith("dS") ? "for products" : "to write it in whole lines"}`;
    case "release": return `${who}${released(step, names)}`;
    default: {
      if (run.consumers.length && step.atom !== "barrier_sync") return `${who}wait ${awaited(run, step, names)}`;
      const landed = step.tiles.length ? ` until ${names} ${step.tiles.length > 1 ? "have" : "has"} landed` : "";
      return `${who}wait${landed}; all warps meet`;
    }
  }
}

// Who does a step: warps, or a role of a warp-specialised kernel.
function whoseStep(run, step) {
  const consumer = run.consumers.indexOf(step.warpgroup), warps = `${step.warps.includes("-") ? "warps" : "warp"} ${step.warps}`;
  if (!isOfRole(run, step)) return warps;
  return `${consumer < 0 ? "producer" : `consumer ${consumer}`}, ${warps}`;
}

// What a role waits for. Products of wgmma and tensor copies take place while their warps go on.
function awaited(run, step, names) {
  const have = step.tiles.length > 1 ? "have" : "has";
  switch (step.operation || step.atom) {
    case "producer_acquire": return names ? `until all consumers have released the stage of ${names}` : "for a stage that is free: this one is";
    case "consumer_wait": return names ? `until ${names} ${have} landed: the stage is full` : "for the next query tile: there is none";
    case "bar_sync":
      if (!run.backward) return "for its turn to issue products";
      return names ? `until both consumers have put their keys of ${names} into shared memory` : "until both consumers have read K and V";
    case "wgmma_complete":
      if (!names) return "until no more than one product is under way";
      return `until the product for ${names.replace(/^dS/, "dP")} is complete${run.backward ? AFTER[step.tiles[0][0]] || "" : ""}`;
    default: return `until the tensor copies have read ${names} from shared memory`;
  }
}

function released(step, names) {
  switch (step.operation || step.atom) {
    case "bar_arrive": return "give the turn to issue products to the next consumer";
    case "producer_commit": return "say that there is no more work";
    default: return `release the stage of ${names}: it may be filled again`;
  }
}

// What becomes of S and dP, once they are there.
const AFTER = {S: ", then P = exp(scale × S - lse)", s: ", then dS = P × (dP - delta)"};

// A product of a backward pass, by its result. A warp has keys, so that S and dP lie in its registers transposed. Of a consumer's product
// nothing is there yet when it has been issued.
function gradientProduct(run, step) {
  const rows = isOfRole(run, step) ? run.block / run.consumers.length : 0, share = (what) => (rows ? `, for its ${rows} ${what}` : "");
  const [tile] = step.tiles, then = rows ? share("keys") : AFTER[tile[0]];
  const of = (letter) => tileName(step.needs.find((needed) => needed[0] === letter));
  switch (tile[0]) {
    case "S": return `${tileName(tile)}ᵀ = ${of("K")} × ${of("Q")}ᵀ${then}`;
    case "s": return `dP ${tile.slice(1)}ᵀ = ${of("V")} × ${of("o")}ᵀ${then}`;
    case "v": return `${tileName(tile)} += ${of("S").replace("S", "P")}ᵀ × ${of("o")}${share("keys")}`;
    case "k": return `${tileName(tile)} += ${of("s")}ᵀ × ${of("Q")}${share("keys")}`;
    default: return `${of("s")} × ${of("K")}, this key tile's part of ${tileName(tile)}${share("queries")}`;
  }
}

const NAMES = {o: "dO", q: "dQ", k: "dK", v: "dV", s: "dS", A: "sums of dQ", L: "lse", D: "delta"};

function tileName(tile) {
  const index = tile.slice(1);
  return tile[0] === "R" ? `O ${index} with row_max and row_sum` : `${NAMES[tile[0]] || tile[0]} ${index}`;
}
