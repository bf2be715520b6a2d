// Which runs are shown, at which step, and how a reader moves: buttons, the slider, the keyboard, the theme.
"use strict";

const player = {step: 0, row: null, timer: null, panels: [], view: "", mask: RUNS[0].mask};
const built = new Map(); // panels by run: made when they are first shown

function panelOf(run) {
  if (!built.has(run)) built.set(run, new Panel(run));
  return built.get(run);
}

const families = [...new Set(RUNS.map((run) => run.family))];
// Views of two versions side by side: their families and their titles.
const SIDES = {
  both: {shown: ["flash1_forward", "flash2_forward"], title: "Version 1 and 2"},
  "both-backward": {shown: ["flash1_backward", "flash2_backward"], title: "Version 1 and 2, backward"},
};
const sides = Object.keys(SIDES).filter((view) => SIDES[view].shown.every((family) => families.includes(family)));
const shownFamilies = (view) => (SIDES[view] ? SIDES[view].shown : [view]);
const titleOf = (family) => RUNS.find((run) => run.family === family).title;

function lastStep() {
  return Math.max(...player.panels.map((panel) => panel.run.steps.length)) - 1;
}

function render() {
  player.panels.forEach((panel) => panel.show(player.step, player.row));
  byId("slider").max = lastStep();
  byId("slider").value = player.step;
  byId("slider").setAttribute("aria-valuetext", `step ${player.step + 1} of ${lastStep() + 1}`);
  byId("position").textContent = `${player.step + 1} of ${lastStep() + 1}`;
}

function goTo(step) {
  player.step = Math.max(0, Math.min(step, lastStep()));
  if (player.step === lastStep()) stop();
  render();
}

// While it plays nothing is read aloud: no voice is as fast.
function speak(aloud) {
  document.querySelectorAll("[aria-live]").forEach((part) => part.setAttribute("aria-live", aloud ? "polite" : "off"));
}

function stop() {
  clearInterval(player.timer);
  player.timer = null;
  speak(true);
  byId("play").textContent = "Play";
  byId("play").setAttribute("aria-label", "Play (space)");
}

function play() {
  if (player.timer !== null) return stop();
  if (player.step === lastStep()) goTo(0);
  player.timer = setInterval(() => goTo(player.step + 1), Number(byId("speed").value));
  speak(false);
  byId("play").textContent = "Pause";
  byId("play").setAttribute("aria-label", "Pause (space)");
}

// Shows the runs of a view. The step stays, as far as there are so many.
function choose(view, mask) {
  player.view = view;
  player.mask = mask;
  player.panels = shownFamilies(view).map((family) => panelOf(RUNS.find((run) => run.family === family && run.mask === mask)));
  const [{run}] = player.panels, longest = Math.max(...player.panels.map((panel) => panel.run.length));
  const sizes = `One head of ${run.length} queries and keys, head dim ${DATA.problem.headDim}, fp16: tiles of ${run.block} rows.`;
  byId("problem").textContent = `${sizes} S = QKᵀ, P = softmax(scale S), O = PV.`;
  if (player.row === null) player.row = liveliestRow(run);
  player.row = Math.min(player.row, longest - 1);
  byId("row").max = longest - 1;
  byId("row").value = player.row;
  byId("panels").replaceChildren(...player.panels.map((panel) => panel.root));
  byId("panels").dataset.view = view;
  for (const button of document.querySelectorAll("button[data-view], button[data-mask]"))
    button.setAttribute("aria-pressed", String([view, mask].includes(button.dataset.view || button.dataset.mask)));
  goTo(player.step);
}

function choiceButtons(group, attribute, choices, act) {
  for (const [value, text] of choices)
    byId(group).append(element("button", {type: "button", [`data-${attribute}`]: value, text, onclick: () => act(value)}));
  byId(group).hidden = choices.length < 2;
}

const KEYS = {
  ArrowRight: () => goTo(player.step + 1),
  ArrowLeft: () => goTo(player.step - 1),
  Home: () => goTo(0),
  End: () => goTo(lastStep()),
  " ": play,
};

function onKey(event) {
  const {tagName} = event.target;
  const types = tagName === "SELECT" || tagName === "INPUT"; // they have keys of their own; the slider's do the same
  const presses = event.key === " " && ["BUTTON", "SUMMARY"].includes(tagName);
  if (types || presses || !KEYS[event.key] || event.ctrlKey || event.altKey || event.metaKey) return;
  event.preventDefault();
  KEYS[event.key]();
}

function start() {
  byId("device").textContent = DATA.device;
  byId("levels").append(...DATA.levels.map(({name, size, bandwidth}) =>
    element("li", {}, element("b", {text: name}), element("span", {text: size}), element("span", {text: bandwidth}))));
  const names = families.map((family) => [family, titleOf(family)]);
  choiceButtons("views", "view", [...sides.map((view) => [view, SIDES[view].title]), ...names], (view) => choose(view, player.mask));
  const masks = [...new Set(RUNS.map((run) => run.mask))].map((mask) => [mask, mask === "causal" ? "Causal mask" : "No mask"]);
  choiceButtons("masks", "mask", masks, (mask) => choose(player.view, mask));
  byId("row").addEventListener("input", () => {
    player.row = Math.max(0, Math.min(Number(byId("row").max), Math.floor(Number(byId("row").value)) || 0));
    render();
  });
  byId("slider").addEventListener("input", () => goTo(Number(byId("slider").value)));
  byId("first").addEventListener("click", KEYS.Home);
  byId("back").addEventListener("click", KEYS.ArrowLeft);
  byId("forward").addEventListener("click", KEYS.ArrowRight);
  byId("last").addEventListener("click", KEYS.End);
  byId("play").addEventListener("click", play);
  byId("speed").addEventListener("change", () => player.timer !== null && (stop(), play()));
  document.addEventListener("keydown", onKey);
  startTheme();
  choose(sides[0] || families[0], player.mask);
}

start();
