// One cell: its configs by the names of their parts, its charts with what they say of the chosen config, and its tables.
"use strict";

const STATE_RANK = {measured: 0, predicted: 0, failed: 1, untried: 2, slower: 3};

// A candidate of the data, and what a voice reads of it.
function candidateOf(raw, i, cell) {
  const [state, seconds, low, high, predicted, registers, spills, shared, ...texts] = raw;
  const [family, settings, described, failure] = texts.map((number) => DATA.texts[number]);
  const config = {key: i, state, seconds, low, high, predicted, registers, spills, shared, family, settings, described, failure};
  config.winner = cell.winner === i;
  config.default = cell.default === i;
  config.words = configWords(config);
  return config;
}

function slowerOf([family, described, predicted, boundBy], i) {
  const unknown = {seconds: null, low: null, high: null, registers: null, spills: null, shared: null, failure: ""};
  const texts = {family: DATA.texts[family], described: DATA.texts[described], boundBy: DATA.texts[boundBy]};
  const config = {key: `slower-${i}`, state: "slower", predicted, ...unknown, ...texts};
  config.words = configWords(config);
  return config;
}

function configWords(config) {
  const {state, seconds, low, high, predicted, registers, spills, shared, family, described, failure} = config;
  const parts = [`${config.winner ? "Winner, " : ""}${config.default ? "untuned default, " : ""}${OUTCOMES[state][1]}`];
  if (failure) parts.push(`why: ${failure}`);
  if (seconds !== null) parts.push(`${micro(seconds)} us${low === null ? "" : ` (10 % ${micro(low)}, 90 % ${micro(high)})`}`);
  parts.push(`predicted ${micro(predicted)} us`);
  if (registers !== null) parts.push(`${registers} registers, ${fixed(spills)} B of spills, ${shared} B of shared memory`);
  const sentence = parts.join("; ");
  return `${sentence[0].toUpperCase()}${sentence.slice(1)}. ${family}: ${described}.`;
}

for (const cell of DATA.cells) {
  cell.configs = cell.candidates.map((raw, i) => candidateOf(raw, i, cell));
  cell.slower = cell.slower.map(slowerOf);
}

const sortTime = (config) => timeOf(config) ?? config.predicted;
const inOrder = (configs) =>
  [...configs].sort((one, other) => STATE_RANK[one.state] - STATE_RANK[other.state] || sortTime(one) - sortTime(other));

// The places of values in their order, equal ones in the middle of theirs.
function ranksOf(values) {
  return values.map((x) => values.filter((y) => y < x).length + (values.filter((y) => y === x).length - 1) / 2);
}

// Spearman's rank correlation, null where all of one kind are the same.
function rankCorrelation(one, other) {
  const [a, b] = [one, other].map((values) => {
    const ranks = ranksOf(values), mean = (values.length - 1) / 2;
    return ranks.map((rank) => rank - mean);
  });
  const product = (x, y) => x.reduce((sum, value, i) => sum + value * y[i], 0);
  return product(a, a) * product(b, b) ? product(a, b) / Math.sqrt(product(a, a) * product(b, b)) : null;
}

// How far predictions are from what was measured, in a sentence.
function agreement(configs) {
  const ratios = configs.map(({seconds, predicted}) => seconds / predicted).sort((x, y) => x - y);
  const middle = (ratios[(ratios.length - 1) >> 1] + ratios[ratios.length >> 1]) / 2;
  if (configs.length < 2) return `Measured over predicted: ${ratios[0].toFixed(3)}, of one config.`;
  const best = Math.min(...configs.map(({seconds}) => seconds));
  const first = configs.reduce((one, other) => (other.predicted < one.predicted ? other : one));
  const rank = rankCorrelation(configs.map(({predicted}) => predicted), configs.map(({seconds}) => seconds));
  return `Measured over predicted, of ${counted(configs.length)}: median ${middle.toFixed(3)}, from ${ratios[0].toFixed(3)} to ` +
    `${ratios[ratios.length - 1].toFixed(3)}; rank correlation ${rank === null ? NONE : rank.toFixed(2)}. ` +
    `What the model expects to be the fastest of them takes ${(100 * (first.seconds / best - 1)).toFixed(1)} % more than the fastest.`;
}

class CellPanel {
  constructor(cell) {
    this.cell = cell;
    this.withSlower = false;
    const measured = inOrder(cell.configs.filter(({state}) => state === "measured"));
    this.space = new Chart("Time against config", (width) => drawSpace(this.shown(), width), (key) => this.choose(key));
    this.prediction = measured.length
      ? new Chart("Prediction against measurement", (width) => drawPrediction(measured, width), (key) => this.choose(key))
      : null;
    this.detail = element("p", {class: "detail", text: "Choose a point to read of its config."});
    this.keys = element("div", {});
    this.table = candidatesTable(inOrder(cell.configs));
    const toggle = element("input", {type: "checkbox", id: "with-slower"});
    toggle.addEventListener("change", () => this.showSlower(toggle.checked));
    const offer = element("label", {}, toggle, ` with the ${cell.slower.length} that the model expects to be slower`);
    const against = this.prediction
      ? [this.prediction.root, outcomeKeys(measured), element("p", {class: "figures", text: agreement(measured)})]
      : [element("p", {text: "Nothing was measured in this cell, so that there is nothing to hold predictions against."})];
    this.root = element("section", {"aria-label": cellName(cell)},
      element("div", {class: "charts"},
        element("div", {class: "card", id: "space"}, element("h3", {text: "Time against config"}), this.space.root, this.keys,
          ...(cell.slower.length ? [offer] : [])),
        element("div", {class: "card", id: "prediction"}, element("h3", {text: "Prediction against measurement"}), ...against)),
      this.detail,
      element("h3", {text: `Candidates: ${counted(cell.configs.length)}`}), this.table, ...passedOver(cell));
    this.showSlower(false);
  }

  shown() {
    return inOrder([...this.cell.configs, ...(this.withSlower ? this.cell.slower : [])]);
  }

  showSlower(with_) {
    this.withSlower = with_;
    this.keys.replaceChildren(outcomeKeys(this.shown()));
    this.space.redraw();
  }

  choose(key) {
    const config = this.shown().find((one) => one.key === key);
    this.detail.textContent = config.words;
    this.detail.classList.add("about");
    this.space.show(key);
    if (this.prediction) this.prediction.show(key);
    for (const row of this.table.querySelectorAll("tbody tr")) row.classList.toggle("chosen", row.dataset.key === String(key));
  }
}
