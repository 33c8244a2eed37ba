// Draws the tree of one cycle: from left to right, children in the order in which they were tried.

import { draw, make, percent, show } from "./dom.js";
import { ROOT, TARGET, letterOf, nameOf, styleOf } from "./sources.js";

const ROW = 28, BOX = 23, GAP = 30, LETTER = 7.3, BADGE = 20, MARK = 14, PAD = 7, MAX_CHARACTERS = 14;
const MIN_SCALE = 0.85, MAX_SCALE = 1.3;

// What became of each node: accepted, rejected (its parent was accepted), unreached, or added by the target.
export function resultsOf(cycle) {
  const nodes = cycle.nodes.map((node, index) => ({
    ...node, index,
    result: index === 0 ? "root" : node.accepted ? "accepted"
      : cycle.nodes[node.parent].accepted ? "rejected" : "unreached",
  }));
  const own = cycle.tokens.find((token) => token.node === null);
  if (own) {
    const path = nodes.filter((node) => node.accepted);
    const text = own.text || (cycle.finish === "stop" ? "end" : "…"); // "…": a part of a character
    nodes.push({
      ...own, text, index: nodes.length, parent: path.at(-1).index, source: TARGET, expected: null, result: "own",
    });
  }
  return nodes;
}

const RESULTS = {
  root: "the last token before this pass", accepted: "accepted", rejected: "not what the model wanted",
  unreached: "not reached: a guess before it was wrong", own: "added by the model",
};
const MARKS = { accepted: "✓", rejected: "✕" };

export const resultText = (node) => RESULTS[node.result];

export function describeNode(node) {
  const parts = [`“${show(node.text)}”`];
  if (node.source !== ROOT && node.source !== TARGET) {
    parts.push(`from ${nameOf(node.source)}`, `drafter expected ${percent(node.expected)}`);
  }
  if (node.result !== "root") parts.push(`model's probability ${percent(node.target)}`);
  parts.push(resultText(node));
  return parts.join(" · ");
}

export function describeCycle(cycle) {
  const drafted = cycle.nodes.length - 1;
  const kept = cycle.tokens.filter((token) => token.node !== null);
  const joined = cycle.tokens.map((token) => token.text).join("");
  const text = joined ? JSON.stringify(joined) : cycle.finish === "stop" ? "the end" : "a part of a character";
  if (drafted === 0) return `No guesses: the model adds ${text}.`;
  const own = kept.length < cycle.tokens.length ? ", and the model adds one token" : "";
  return `${drafted} guessed, ${kept.length} accepted${own}: ${text}.`;
}

const shorten = (text) => (text.length > MAX_CHARACTERS ? `${text.slice(0, MAX_CHARACTERS - 1)}…` : text);

// Places every node: x by depth, y so that a parent is level with its first child.
function place(nodes) {
  const children = nodes.map(() => []);
  for (const node of nodes) {
    node.shown = shorten(show(node.text));
    node.width = 2 * PAD + BADGE + Math.max(2, [...node.shown].length) * LETTER + (MARKS[node.result] ? MARK : 0);
    node.depth = node.index === 0 ? 0 : nodes[node.parent].depth + 1;
    if (node.index > 0) children[node.parent].push(node);
  }
  const widths = [];
  for (const node of nodes) widths[node.depth] = Math.max(widths[node.depth] ?? 0, node.width);
  const starts = [4];
  widths.forEach((width, depth) => { starts[depth + 1] = starts[depth] + width + GAP; });
  let row = 0;
  const waiting = [nodes[0]]; // a list, not a recursion: trees are deep
  while (waiting.length) {
    const node = waiting.pop();
    const siblings = node.index === 0 ? [node] : children[node.parent];
    if (siblings[0] !== node) row += 1;
    node.x = starts[node.depth];
    node.y = 4 + row * ROW;
    waiting.push(...children[node.index].toReversed());
  }
  return { width: starts.at(-1) - GAP + 8, height: 8 + row * ROW + BOX };
}

function drawEdge(node, parent) {
  const [x1, y1, x2, y2] = [parent.x + parent.width, parent.y + BOX / 2, node.x, node.y + BOX / 2];
  const middle = x2 - GAP / 2;
  const path = `M${x1} ${y1}H${Math.max(x1, x2 - GAP)}C${middle} ${y1} ${middle} ${y2} ${x2} ${y2}`;
  return draw("path", { d: path, class: `edge ${node.result}`, pathLength: 1 });
}

function drawNode(node, onSelect) {
  const room = node.width - 2 * PAD - BADGE - (MARKS[node.result] ? MARK : 0);
  const bars = [];
  if (node.result !== "root") {
    if (node.expected !== null) bars.push(draw("rect", { class: "bar expected", y: BOX - 6, width: room * node.expected }));
    bars.push(draw("rect", { class: "bar target", y: BOX - 3.6, width: room * node.target }));
    for (const bar of bars) {
      bar.setAttribute("x", PAD + BADGE - 1);
      bar.setAttribute("height", 2);
    }
  }
  const select = () => onSelect(node);
  return draw("g", {
    class: `node ${node.result} ${styleOf(node.source)}`, transform: `translate(${node.x} ${node.y})`,
    onmouseenter: select, onclick: select,
  },
    draw("title", {}, describeNode(node)),
    draw("rect", { class: "box", width: node.width, height: BOX, rx: 6 }),
    draw("circle", { class: "badge", cx: PAD + 6, cy: BOX / 2, r: 7.5 }),
    draw("text", { class: "letter", x: PAD + 6, y: BOX / 2 + 3.6 }, letterOf(node.source)),
    draw("text", { class: "word", x: PAD + BADGE - 1, y: 14 }, node.shown),
    ...(MARKS[node.result] ? [draw("text", { class: "mark", x: node.width - PAD, y: 15 }, MARKS[node.result])] : []),
    ...bars,
  );
}

export function drawTree(cycle, container, onSelect, animate) {
  const nodes = resultsOf(cycle);
  const { width, height } = place(nodes);
  const scale = Math.min(MAX_SCALE, Math.max(MIN_SCALE, (container.clientWidth - 8) / width));
  const lit = nodes.filter((node) => node.result === "accepted" || node.result === "own");
  const svg = draw("svg", {
    viewBox: `0 0 ${width} ${height}`, width: width * scale, height: height * scale, role: "img",
    "aria-label": describeCycle(cycle), class: animate ? "animate" : null,
  });
  const parts = nodes.map((node) => ({
    node, group: drawNode(node, onSelect), edge: node.index === 0 ? null : drawEdge(node, nodes[node.parent]),
  }));
  const onTop = (part) => (lit.includes(part.node) ? 1 : 0);
  svg.append(...parts.slice(1).toSorted((a, b) => onTop(a) - onTop(b)).map((part) => part.edge));
  svg.append(...parts.map((part) => part.group));
  lit.forEach((node, step) => {
    for (const part of [parts[node.index].group, parts[node.index].edge]) part.style.setProperty("--step", step);
  });
  container.replaceChildren(svg);
  const last = lit.at(-1) ?? nodes[0];
  container.scrollTo({
    left: Math.max(0, (last.x + last.width) * scale - container.clientWidth + 12),
    top: Math.max(0, last.y * scale - container.clientHeight / 2),
  });
}

export function fillTable(cycle, body) {
  body.replaceChildren(...resultsOf(cycle).map((node) => make("tr", { class: node.result },
    make("td", {}, String(node.index)),
    make("td", {}, node.index === 0 ? "" : String(node.parent)),
    make("td", {}, make("code", {}, show(node.text))),
    make("td", {}, make("span", { class: `tag ${styleOf(node.source)}` }, letterOf(node.source)), ` ${nameOf(node.source)}`),
    make("td", {}, node.expected === null || node.result === "root" ? "" : percent(node.expected)),
    make("td", {}, node.result === "root" ? "" : percent(node.target)),
    make("td", {}, resultText(node)),
  )));
}
