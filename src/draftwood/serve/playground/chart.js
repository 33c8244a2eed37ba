// Two charts of an answer: the tokens of each pass by source, and the speed over time.

import { count, draw, number } from "./dom.js";
import { styleOf } from "./sources.js";

const LEFT = 30, BOTTOM = 14, TOP = 8, RIGHT = 6;
const WINDOW = 12; // passes that the speed is taken over

function frame(container, top, label) {
  const width = Math.max(120, container.clientWidth), height = Math.max(80, container.clientHeight);
  const svg = draw("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label });
  const y = (value) => TOP + (height - TOP - BOTTOM) * (1 - value / top);
  for (const value of [0, top / 2, top]) {
    svg.append(
      draw("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: y(value), y2: y(value) }),
      draw("text", { class: "tick", x: LEFT - 5, y: y(value) + 3.5 }, number(value, Number.isInteger(value) ? 0 : 1)),
    );
  }
  container.replaceChildren(svg);
  return { svg, y, x: (share) => LEFT + (width - LEFT - RIGHT) * share, width, height };
}

const roundUp = (value) => {
  const unit = 10 ** Math.floor(Math.log10(Math.max(value, 1)));
  return [1, 2, 4, 5, 6, 8, 10].map((step) => step * unit).find((each) => each >= value);
};

export function drawPasses(container, cycles, current, onPick) {
  const most = Math.max(2, ...cycles.map((cycle) => cycle.tokens.length));
  const tokens = cycles.reduce((sum, cycle) => sum + cycle.tokens.length, 0);
  const mean = tokens / Math.max(1, cycles.length);
  const top = most % 2 ? most + 1 : most;
  const { svg, x, y } = frame(container, top,
    `${count(tokens, "token")} in ${count(cycles.length, "pass")}: ${number(mean, 2)} a pass, at most ${most}.`);
  const slots = Math.max(cycles.length, 12), step = x(1 / slots) - x(0);
  cycles.forEach((cycle, index) => {
    const group = draw("g", { class: index === current ? "pick current" : "pick", onclick: () => onPick(index) },
      draw("rect", { class: "hit", x: x(index / slots), y: y(top), width: step, height: y(0) - y(top) }));
    cycle.tokens.forEach((token, place) => group.append(draw("rect", {
      class: `part ${styleOf(token.source)}`, x: x(index / slots) + Math.min(1, step / 6), y: y(place + 1) + 0.5,
      width: Math.max(0.8, step - Math.min(2, step / 3)), height: Math.max(1, y(place) - y(place + 1) - 1),
    })));
    svg.append(group);
  });
  if (cycles.length) {
    svg.append(draw("line", { class: "mean", x1: x(0), x2: x(1), y1: y(mean), y2: y(mean) }));
  }
}

// [time, tokens a second] after each pass; the first one is left out: it read the prompt.
export function speeds(cycles) {
  const points = [];
  for (let index = 1; index < cycles.length; index += 1) {
    const from = Math.max(0, index - WINDOW);
    const seconds = cycles[index].at - cycles[from].at;
    let tokens = 0;
    for (let each = from + 1; each <= index; each += 1) tokens += cycles[each].tokens.length;
    if (seconds > 0 && index >= Math.min(3, cycles.length - 1)) points.push([cycles[index].at, tokens / seconds]);
  }
  return points;
}

const join = (points, x, y) => points.map(([a, b], index) => `${index ? "L" : "M"}${x(a)} ${y(b)}`).join("");

export function drawSpeeds(container, run, current, onPick) {
  const lines = [["line drafted", speeds(run.cycles)]];
  if (run.plain) lines.unshift(["line plain", speeds(run.plain.cycles)]);
  const all = lines.flatMap(([, points]) => points);
  const end = Math.max(0.05, ...all.map(([at]) => at)), top = roundUp(1.05 * Math.max(4, ...all.map(([, value]) => value)));
  const last = (points) => (points.length ? number(points.at(-1)[1], 0) : "none");
  const label = `Tokens a second, at the end ${last(lines.at(-1)[1])}`
    + (run.plain ? `; plain decoding ${last(lines[0][1])}.` : ".");
  const { svg, x, y, width, height } = frame(container, top, label);
  const place = (at) => x(at / end);
  for (const [kind, points] of lines) svg.append(draw("path", { class: kind, d: join(points, place, y) }));
  const cycle = run.cycles[current];
  if (cycle) svg.append(draw("line", { class: "cursor", x1: place(cycle.at), x2: place(cycle.at), y1: TOP, y2: y(0) }));
  svg.append(draw("text", { class: "note", x: width - RIGHT, y: height - 2 }, `${number(end)} s`));
  svg.addEventListener("click", (event) => {
    const at = end * (event.offsetX - x(0)) / (x(1) - x(0));
    const index = run.cycles.findIndex((each) => each.at >= at);
    if (run.cycles.length) onPick(index < 0 ? run.cycles.length - 1 : index);
  });
}
