// What is said of the whole tune, the roofline, and which cell is shown.
"use strict";

const panels = new Map(); // by cell: made when they are first shown

function showCell(i) {
  byId("cell").value = String(i);
  if (!panels.has(i)) panels.set(i, new CellPanel(DATA.cells[i]));
  byId("panel").replaceChildren(panels.get(i).root);
}

// Whether times were measured, in one place that nobody can miss.
function verdict() {
  const measured = DATA.cells.filter((cell) => cell.measured).length;
  if (DATA.timed) return ["Measured", "on this GPU; predictions stand beside the times."];
  if (!measured) return ["Predicted", "nothing was timed: all times are the model's."];
  const known = `${measured} of ${DATA.cells.length} winners have times from tuning records of such a GPU`;
  return ["Predicted", `nothing was timed: ${known}, all other times are the model's.`];
}

function notes() {
  const seconds = DATA.seconds.toFixed(1);
  const lines = DATA.timed
    ? [`${DATA.measured} candidates were measured now, the rest come from the records, in ${seconds} s.`,
      "Gain is the untuned default's time over the winner's."]
    : [`Ranked and compiled in ${seconds} s. Registers, spills and shared memory are the compiler's.`,
      `${DATA.verifiedOnCpu} winners ran on the CPU, thread for thread, and agree with the reference.`];
  if (DATA.notVerified) lines.push(`Others were not verified: ${DATA.notVerified}`);
  if (!DATA.deviceMeasured) lines.push("No measurement on this device stands behind the model.");
  if (!DATA.complete) lines.push("The budget ended before all candidates were tried: run again to go on.");
  return lines;
}

function startRoofline() {
  const detail = element("p", {class: "detail", text: "Choose a point to read of its cell; Enter or a click shows its search space."});
  const chart = new Chart("Winners on the roofline", drawRoofline, (i) => {
    detail.textContent = cellWords(DATA.cells[i]);
    chart.show(i);
    for (const row of byId("roofline").querySelectorAll("tbody tr")) row.classList.toggle("chosen", row.dataset.key === String(i));
  }, showCell);
  byId("roofline").append(chart.root, rooflineKeys(), detail, rooflineTable());
  chart.redraw();
}

function start() {
  byId("device").textContent = DATA.device;
  const [word, rest] = verdict();
  byId("verdict").append(element("strong", {class: DATA.timed ? "badge" : "badge guess", text: word}), ` ${rest}`);
  byId("notes").append(...notes().map((text) => element("li", {text})));
  byId("winners").append(winnersTable());
  startRoofline();
  byId("cell").append(...DATA.cells.map((cell, value) => element("option", {value, text: cellName(cell)})));
  byId("cell").addEventListener("change", () => showCell(Number(byId("cell").value)));
  startTheme();
  showCell(0);
}

start();
