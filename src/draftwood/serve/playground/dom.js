// Small helpers to build elements.

const SVG = "http://www.w3.org/2000/svg";

export const find = (id) => document.getElementById(id);

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children);
  return node;
}

export const make = (tag, attributes = {}, ...children) => fill(document.createElement(tag), attributes, children);

export const draw = (tag, attributes = {}, ...children) =>
  fill(document.createElementNS(SVG, tag), attributes, children);

export function percent(value) {
  if (value > 0 && value < 0.01) return "<1%";
  if (value < 1 && value > 0.99) return ">99%";
  return `${Math.round(100 * value)}%`;
}

export const number = (value, digits = 1) => value.toFixed(digits);

export const count = (value, one) => `${value} ${one}${value === 1 ? "" : one.endsWith("s") ? "es" : "s"}`;

// A token as it stands in a text: blanks that would not be seen have signs.
export function show(text) {
  return text.replace(/\n/g, "⏎").replace(/\t/g, "⇥").replace(/^ | $/g, "␣").replace(/ /g, "\u00a0");
}
