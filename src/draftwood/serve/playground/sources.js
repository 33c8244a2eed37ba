// Every source of guesses has a colour, a letter and a kind of underline: none of them has to be seen alone.

export const TARGET = "target";
export const ROOT = "root";
const NUM_STYLES = 7; // of style.css: .s0 to .s6
const KNOWN = ["context", "transition"]; // keep their place, whatever comes first

const places = new Map(KNOWN.map((name, place) => [name, place]));
const letters = new Map([["context", "C"], ["transition", "T"]]);

const MEANINGS = {
  context: "copied from the text so far",
  transition: "what the model found likely after this token before",
  suffix: "copied from a matching end of the text",
  ngram: "likely after the last few tokens",
  corpus: "found in a collection of texts",
  position: "what the model found likely at this place one pass before",
  target: "the model's own token",
};

function placeOf(source) {
  if (!places.has(source)) places.set(source, places.size);
  return places.get(source);
}

export function styleOf(source) {
  if (source === TARGET || source === ROOT) return `s-${source}`;
  return `s${placeOf(source) % NUM_STYLES}`;
}

// The first letter of its name that no other source has; of two sources that agreed, both letters.
export function letterOf(source) {
  if (source === TARGET) return "★";
  if (source === ROOT) return "•";
  if (!letters.has(source)) {
    const taken = new Set(letters.values()), name = source.toUpperCase();
    const initials = name.split("+").map((part) => part[0]).join("");
    const own = [...name, ..."ABCDEFGHIJKLMNOPQRSTUVWXYZ"].filter((letter) => /[A-Z0-9]/.test(letter));
    const wanted = initials.length === 2 ? [initials, ...own] : own;
    letters.set(source, wanted.find((letter) => !taken.has(letter)) ?? "?");
  }
  return letters.get(source);
}

export function nameOf(source) {
  return source === TARGET ? "the model" : source;
}

export function meaningOf(source) {
  return MEANINGS[source] ?? `suggested by ${source.split("+").join(" and ")}`;
}
