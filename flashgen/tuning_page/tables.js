// Tables: the text alternative of each chart, and the configs that were not tried.
"use strict";

const NONE = "-";
const fixed = (value, digits = 0) => (value === null ? NONE : value.toFixed(digits));
const micro = (seconds) => (seconds === null ? NONE : us(seconds).toFixed(1));

// A table that scrolls in itself. columns: heading, and the class of its cells; rows: texts, or elements.
function tableOf(label, columns, rows, keys = []) {
  const head = element("tr", {}, ...columns.map(([text, kind]) => element("th", {scope: "col", class: kind, text})));
  const body = rows.map((cells, i) => element("tr", keys.length ? {"data-key": keys[i]} : {},
    ...cells.map((content, j) => element("td", {class: columns[j][1]}, content))));
  return element("div", {class: "scroll", tabindex: "0", role: "region", "aria-label": label},
    element("table", {}, element("thead", {}, head), element("tbody", {}, ...body)));
}

const WORDS = "words", SHORT = "words short", NUMBER = "number";

function winnersTable() {
  const columns = [["problem", SHORT], ["workload", SHORT], ["time us", NUMBER], ["time is", SHORT], ["TFLOP/s", NUMBER],
    ["gain x", NUMBER], ["registers", NUMBER], ["spills B", NUMBER], ["shared B", NUMBER], ["bound by", SHORT], ["tried", NUMBER],
    ["failed", NUMBER], ["config", WORDS]];
  const rows = DATA.cells.map((cell) => {
    const found = cell.winner === null ? null : cell.configs[cell.winner];
    const kind = cell.measured ? "measured" : "predicted";
    return [cell.problem, cell.workload, micro(cell.seconds), found ? kind : NONE, fixed(cell.tflops, 1), fixed(cell.gain, 2),
      fixed(cell.registers), fixed(cell.spills), fixed(cell.shared), cell.boundBy || NONE, String(cell.tried),
      String(cell.failed), found ? `${found.family}: ${found.settings}` : "none sound"];
  });
  return tableOf("Winners", columns, rows);
}

function rooflineTable() {
  const columns = [["problem", SHORT], ["workload", SHORT], ["GFLOP", NUMBER], ["each operand once MB", NUMBER], ["FLOP/B", NUMBER],
    ["by its loops MB", NUMBER], ["TFLOP/s", NUMBER], ["roof TFLOP/s", NUMBER], ["% of the roof", NUMBER], ["limited by", SHORT]];
  const rows = DATA.cells.map((cell) => [
    cell.problem, cell.workload, fixed(cell.flops / 1e9, 1), fixed(cell.bytes / 1e6, 2), fixed(cell.intensity, 1),
    fixed(cell.loopBytes === null ? null : cell.loopBytes / 1e6, 2), fixed(cell.tflops, 1), fixed(cell.attainable / 1e12, 1),
    cell.tflops === null ? NONE : fixed(shareOfRoof(cell), 1), cell.limit === "memory" ? "memory" : "tensor cores"]);
  return tableOf("Winners on the roofline, as numbers", columns, rows, DATA.cells.map((_, key) => key));
}

function outcomeText({state, winner, failure}) {
  if (failure) return `failed: ${failure}`;
  return `${state === "untried" ? "not tried" : state}${winner ? ", winner" : ""}`;
}

// All candidates, in the order of the chart.
function candidatesTable(configs) {
  const columns = [["", NUMBER], ["config", WORDS], ["outcome", WORDS], ["measured us", NUMBER], ["10 %", NUMBER], ["90 %", NUMBER],
    ["predicted us", NUMBER], ["measured / predicted", NUMBER], ["registers", NUMBER], ["spills B", NUMBER], ["shared B", NUMBER]];
  const rows = configs.map((config, i) => [
    String(i + 1), `${config.family}: ${config.settings}${config.default ? " (untuned default)" : ""}`,
    outcomeText(config), micro(config.seconds),
    micro(config.low), micro(config.high), micro(config.predicted),
    fixed(config.seconds === null ? null : config.seconds / config.predicted, 3), fixed(config.registers), fixed(config.spills),
    fixed(config.shared)]);
  return tableOf("Candidates, as numbers", columns, rows, configs.map(({key}) => key));
}

// Text that is made when a reader opens it: there may be thousands of lines.
function folded(title, fill) {
  const made = element("details", {}, element("summary", {text: title}));
  made.addEventListener("toggle", () => made.childElementCount === 1 && made.append(...fill()), {once: true});
  return made;
}

const counted = (count) => `${count} config${count === 1 ? "" : "s"}`;

// The configs of a cell that were not tried, and why.
function passedOver(cell) {
  const found = [];
  if (cell.slower.length)
    found.push(folded(`Not tried: ${counted(cell.slower.length)} that the model expects to be slower, or cannot tell from others`, () => [
      tableOf("Configs that the model expects to be slower", [["predicted us", NUMBER], ["bound by", SHORT], ["config", WORDS]],
        cell.slower.map(({predicted, boundBy, family, described}) => [micro(predicted), boundBy, `${family}: ${described}`]))]));
  if (cell.dominated.length)
    found.push(folded(`Not tried: ${counted(cell.dominated.length)} that do what another does with less`, () => [
      tableOf("Configs that do what another does with less", [["config", WORDS]],
        cell.dominated.map(([family, described]) => [`${DATA.texts[family]}: ${DATA.texts[described]}`]))]));
  const refused = cell.refused.reduce((sum, [, count]) => sum + count, 0);
  if (refused)
    found.push(folded(`Refused: ${counted(refused)} that cannot be, with all reasons`, () => [
      tableOf("Refused configs", [["why", WORDS], ["configs", NUMBER], ["which", WORDS]],
        cell.refused.map(([why, count, which]) =>
          [DATA.texts[why], String(count), which === null ? "flashgen tune --dry-run names them" : DATA.texts[which]]))]));
  return found;
}
