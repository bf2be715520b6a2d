// What every chart is made of: logarithmic scales, axes, shapes, and points that the pointer and the keyboard reach.
"use strict";

// The namespace of an svg element, as the browser names it: no address stands on the page.
const SVG = Object.assign(document.createElement("template"), {innerHTML: "<svg></svg>"}).content.firstChild.namespaceURI;
const HEIGHT = 300;
const MARGIN = {left: 58, right: 14, top: 26, bottom: 34};

function svgElement(tag, attributes = {}, ...children) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) name === "text" ? (made.textContent = value) : made.setAttribute(name, value);
  made.append(...children);
  return made;
}

const polygon = (corners) => `M${corners.map(([x, y]) => `${x},${y}`).join("L")}Z`;
const star = () => polygon([...Array(10).keys()].map((i) => {
  const radius = i % 2 ? 3.2 : 8, angle = (i * Math.PI) / 5;
  return [radius * Math.sin(angle), -radius * Math.cos(angle)].map((x) => x.toFixed(2));
}));

// Paths about the origin, some 12 wide.
const SHAPES = {
  circle: "M-5,0a5,5 0 1,0 10,0a5,5 0 1,0 -10,0Z",
  diamond: polygon([[0, -6], [6, 0], [0, 6], [-6, 0]]),
  cross: "M-5,-5L5,5M-5,5L5,-5",
  dash: "M-6,0L6,0",
  down: polygon([[-5, -4], [5, -4], [0, 5]]),
  up: polygon([[-6, 5], [6, 5], [0, -6]]),
  square: polygon([[-5, -5], [5, -5], [5, 5], [-5, 5]]),
  star: star(),
};

// A shape with what may be about it: a ring for the default, a halo for what is chosen, and a circle that is easy to hit.
function mark(shape) {
  const circle = (name, r) => svgElement("circle", {class: name, r});
  return [circle("hit", 11), circle("ring", 9.5), circle("halo", 12), svgElement("path", {class: "shape", d: SHAPES[shape]})];
}

// What the shapes of a chart mean, as a list.
function keysOf(entries) {
  const item = ([classes, shape, text]) =>
    element("li", {}, svgElement("svg", {viewBox: "-12 -12 24 24", "aria-hidden": "true", class: classes}, ...mark(shape)), text);
  return element("ul", {class: "keys"}, ...entries.map(item));
}

// From [low, high] to pixels, logarithmically.
function logScale([low, high], [from, to]) {
  const scale = (value) => from + ((to - from) * Math.log(value / low)) / Math.log(high / low);
  scale.domain = [low, high];
  return scale;
}

// A domain that holds all values, with some room about them.
function domainOf(values, room = 1.08) {
  return [Math.min(...values) / room, Math.max(...values) * room];
}

// Round values in a domain, `most` at most: 1, 2, 5, 10, ... where it is wide, equal steps where it is narrow.
function ticksOf([low, high], most) {
  if (high / low < 6) {
    const rough = (high - low) / most, unit = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((x) => x * unit).find((x) => x >= rough);
    const first = Math.ceil(low / step);
    return [...Array(Math.floor(high / step) - first + 1).keys()].map((i) => (first + i) * step);
  }
  const powers = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power++) powers.push(power);
  for (const factors of [[1, 2, 5], [1]]) {
    const ticks = powers.flatMap((power) => factors.map((x) => x * 10 ** power)).filter((x) => x >= low && x <= high);
    if (ticks.length <= most || factors.length === 1) return ticks;
  }
  return [];
}

const tickText = (value) => String(Number(value.toPrecision(6)));

function yAxis(scale, width, title) {
  const lines = ticksOf(scale.domain, 7).flatMap((tick) => [
    svgElement("line", {class: "grid-line", x1: MARGIN.left, x2: width - MARGIN.right, y1: scale(tick), y2: scale(tick)}),
    svgElement("text", {x: MARGIN.left - 6, y: scale(tick) + 4, "text-anchor": "end", text: tickText(tick)}),
  ]);
  return [...lines, svgElement("text", {x: 0, y: 12, text: title})];
}

function xAxis(scale, width, title) {
  const bottom = HEIGHT - MARGIN.bottom;
  const lines = ticksOf(scale.domain, Math.max(2, Math.floor(width / 90))).flatMap((tick) => [
    svgElement("line", {class: "grid-line", x1: scale(tick), x2: scale(tick), y1: MARGIN.top, y2: bottom}),
    svgElement("text", {x: scale(tick), y: bottom + 14, "text-anchor": "middle", text: tickText(tick)}),
  ]);
  return [...lines, xTitle(width, title)];
}

function xTitle(width, title) {
  return svgElement("text", {x: width - MARGIN.right, y: HEIGHT - 3, "text-anchor": "end", text: title});
}

const widths = new ResizeObserver((entries) => entries.forEach(({target}) => target.drawn && target.drawn.redraw()));

// A chart as a list of options, one of which Tab reaches, and arrow keys walk. draw(width) gives what is behind, and the points:
// {key, x, y, shape, classes, label, spread: two heights or none}. choose(key) is called for a point that is focused, pressed or under
// the pointer, act(key) where it is pressed or entered.
class Chart {
  constructor(label, draw, choose, act = () => {}) {
    Object.assign(this, {draw, choose, act, chosen: null, options: new Map()});
    this.svg = svgElement("svg", {role: "listbox", "aria-label": label, height: HEIGHT});
    this.svg.addEventListener("keydown", (event) => this.onKey(event));
    this.root = element("div", {class: "chart"}, this.svg);
    this.root.drawn = this;
    widths.observe(this.root);
  }

  redraw() {
    const width = this.root.clientWidth;
    if (!width) return;
    const focused = this.svg.contains(document.activeElement);
    const {behind, points} = this.draw(width);
    this.svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    this.options = new Map(points.map((point) => [point.key, this.option(point)]));
    this.svg.replaceChildren(svgElement("g", {"aria-hidden": "true"}, ...behind), ...this.options.values());
    this.show(this.chosen);
    if (focused && this.options.has(this.chosen)) this.options.get(this.chosen).focus();
  }

  option({key, x, y, shape, classes, label, spread}) {
    const bar = spread ? [svgElement("line", {class: "spread", x1: 0, x2: 0, y1: spread[0] - y, y2: spread[1] - y})] : [];
    const made = svgElement("g", {role: "option", class: classes, "aria-label": label, "data-key": key, transform: `translate(${x} ${y})`});
    made.append(...bar, ...mark(shape));
    made.addEventListener("focus", () => this.choose(key));
    made.addEventListener("pointerenter", () => this.choose(key));
    made.addEventListener("click", () => (made.focus(), this.act(key)));
    return made;
  }

  // Marks the chosen point. Tab reaches that, or the first.
  show(key) {
    this.chosen = key;
    const stop = this.options.has(key) ? key : this.options.keys().next().value;
    for (const [other, option] of this.options) {
      option.setAttribute("aria-selected", String(other === key));
      option.setAttribute("tabindex", other === stop ? "0" : "-1");
    }
  }

  onKey(event) {
    const keys = [...this.options.keys()], at = keys.indexOf(this.chosen);
    const steps = {ArrowRight: at + 1, ArrowDown: at + 1, ArrowLeft: at - 1, ArrowUp: at - 1, Home: 0, End: keys.length - 1};
    if (event.ctrlKey || event.altKey || event.metaKey || !keys.length) return;
    if (event.key === "Enter" || event.key === " ") this.act(this.chosen);
    else if (event.key in steps) this.options.get(keys[Math.max(0, Math.min(steps[event.key], keys.length - 1))]).focus();
    else return;
    event.preventDefault();
  }
}
