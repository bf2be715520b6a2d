// What the charts show: times of a cell's configs, the model against the clock, and winners on the roofline.
"use strict";

const STRIP = 26; // height of a band for configs that have no time
const us = (seconds) => seconds * 1e6;

// A point's shape says its outcome, filled or not, as well as its colour.
const OUTCOMES = {
  measured: ["circle", "measured"],
  predicted: ["diamond", "predicted, not measured"],
  failed: ["cross", "failed"],
  untried: ["dash", "not tried: the budget ended"],
  slower: ["down", "not tried: the model expects others to be faster"],
};

// The time that a config is shown at, null where it has none.
function timeOf({state, seconds, predicted}) {
  if (state === "measured") return seconds;
  return state === "predicted" || state === "slower" ? predicted : null;
}

function classesOf(config) {
  return [config.state, config.winner ? "winner" : "", config.default ? "default" : ""].join(" ").trim();
}

const shapeOf = (config) => (config.winner ? "star" : OUTCOMES[config.state][0]);

// What the shapes mean of those outcomes that there are.
function outcomeKeys(configs) {
  const found = Object.keys(OUTCOMES).filter((state) => configs.some((config) => config.state === state && !config.winner));
  const entries = found.map((state) => [state, ...OUTCOMES[state]]);
  const winner = configs.find((config) => config.winner);
  if (winner) entries.unshift([`winner ${winner.state}`, "star", `winner, ${winner.state}`]);
  if (configs.some((config) => config.default)) entries.push(["default", "dash", "in a ring: the untuned default"]);
  return keysOf(entries);
}

// Time against config: the fastest first, and those without a time in bands above.
function drawSpace(configs, width) {
  const bands = ["failed", "untried"].filter((state) => configs.some((config) => config.state === state));
  const top = MARGIN.top + bands.length * STRIP, bottom = HEIGHT - MARGIN.bottom;
  const timed = configs.filter((config) => timeOf(config) !== null);
  const sides = timed.flatMap(({low, high}) => [low, high]).filter((x) => x !== null);
  const y = logScale(domainOf([...timed.map(timeOf), ...sides, ...(timed.length ? [] : [1e-6])].map(us)), [bottom, top]);
  const step = (width - MARGIN.left - MARGIN.right) / configs.length;
  const points = configs.map((config, i) => {
    const time = timeOf(config), x = MARGIN.left + (i + 0.5) * step;
    const height = time === null ? MARGIN.top + (bands.indexOf(config.state) + 0.5) * STRIP : y(us(time));
    const spread = config.state === "measured" && config.low !== null ? [y(us(config.low)), y(us(config.high))] : null;
    return {key: config.key, x, y: height, shape: shapeOf(config), classes: classesOf(config), label: config.words, spread};
  });
  const behind = bands.flatMap((state, i) => {
    const at = {x: MARGIN.left, y: MARGIN.top + i * STRIP + 1, width: width - MARGIN.left - MARGIN.right, height: STRIP - 2};
    const text = {x: MARGIN.left - 6, y: at.y + STRIP / 2 + 3, "text-anchor": "end", text: state === "failed" ? "failed" : "not tried"};
    return [svgElement("rect", {class: "band", ...at}), svgElement("text", text)];
  });
  if (timed.length) behind.push(...yAxis(y, width, "us"));
  const every = Math.max(1, Math.ceil((configs.length * 40) / width));
  for (let i = every; i <= configs.length; i += every)
    behind.push(svgElement("text", {x: points[i - 1].x, y: bottom + 14, "text-anchor": "middle", text: i}));
  return {behind: [...behind, xTitle(width, "configs, numbered as in the table")], points};
}

// Prediction against measurement; on the line they are the same.
function drawPrediction(configs, width) {
  const domain = domainOf(configs.flatMap(({seconds, predicted}) => [seconds, predicted]).map(us));
  const x = logScale(domain, [MARGIN.left, width - MARGIN.right]), y = logScale(domain, [HEIGHT - MARGIN.bottom, MARGIN.top]);
  const same = polygon(domain.map((value) => [x(value), y(value)]));
  const behind = [...yAxis(y, width, "measured, us"), ...xAxis(x, width, "predicted, us"), svgElement("path", {class: "same", d: same})];
  const points = configs.map((config) => ({
    key: config.key, x: x(us(config.predicted)), y: y(us(config.seconds)), shape: shapeOf(config), classes: classesOf(config),
    label: config.words, spread: config.low === null ? null : [y(us(config.low)), y(us(config.high))],
  }));
  return {behind, points};
}

const PROBLEM_SHAPES = ["circle", "diamond", "square", "up", "down"];
const problems = [...new Set(DATA.cells.map((cell) => cell.problem))];
const problemShape = (name) => PROBLEM_SHAPES[problems.indexOf(name) % PROBLEM_SHAPES.length];

function rooflineKeys() {
  const kinds = problems.flatMap((name) => [true, false].map((measured) => [name, measured]));
  const shown = DATA.cells.filter((cell) => cell.tflops);
  const there = kinds.filter(([name, measured]) => shown.some((cell) => cell.problem === name && cell.measured === measured));
  return keysOf(there.map(([name, measured]) =>
    [measured ? "measured" : "predicted", problemShape(name), `${name}, ${measured ? "measured" : "predicted"}`]));
}

// FLOP a second of the winners against FLOP a byte, under the roof of bandwidth and tensor cores.
function drawRoofline(width) {
  const cells = DATA.cells.map((cell, key) => ({...cell, key})).filter((cell) => cell.tflops);
  const {flops, bandwidth} = DATA.roof, ridge = flops / bandwidth, roof = (intensity) => Math.min(flops, intensity * bandwidth) / 1e12;
  const across = domainOf([ridge, ...cells.map((cell) => cell.intensity)], 2);
  const x = logScale(across, [MARGIN.left, width - MARGIN.right]);
  const up = domainOf([flops / 1e12, ...cells.map((cell) => cell.tflops)], 1.5);
  const y = logScale(up, [HEIGHT - MARGIN.bottom, MARGIN.top]);
  const first = Math.max(across[0], (up[0] * 1e12) / bandwidth); // where the slope enters the picture
  const line = [first, ridge, across[1]].map((intensity) => `${x(intensity)},${y(roof(intensity))}`).join("L");
  const behind = [
    ...yAxis(y, width, "TFLOP/s"), ...xAxis(x, width, "FLOP a byte"), svgElement("path", {class: "roof", d: `M${line}`}),
    svgElement("text", {x: width - MARGIN.right, y: y(flops / 1e12) - 6, "text-anchor": "end", text: roofText()}),
  ];
  const points = cells.sort((one, other) => one.intensity - other.intensity).map((cell) => ({
    key: cell.key, x: x(cell.intensity), y: y(cell.tflops), shape: problemShape(cell.problem),
    classes: cell.measured ? "measured" : "predicted", label: cellWords(cell), spread: null,
  }));
  return {behind, points};
}

const roofText = () => `${(DATA.roof.flops / 1e12).toFixed(0)} TFLOP/s, ${(DATA.roof.bandwidth / 1e12).toFixed(2)} TB/s`;
const cellName = (cell) => `${cell.problem}, ${cell.workload}`;
const shareOfRoof = (cell) => (100 * cell.tflops * 1e12) / cell.attainable;

function cellWords(cell) {
  const time = `${us(cell.seconds).toFixed(1)} us ${cell.measured ? "measured" : "predicted"}, ${cell.tflops.toFixed(1)} TFLOP/s`;
  return `${cellName(cell)}: ${time} at ${cell.intensity.toFixed(0)} FLOP a byte, ${shareOfRoof(cell).toFixed(0)} % of the roof there, ` +
    `which is that of ${cell.limit === "memory" ? "memory" : "the tensor cores"}.`;
}
