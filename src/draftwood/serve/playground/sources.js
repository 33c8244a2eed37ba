// Every source of guesses has a colour, a letter and a kind of underline: none of them has to be seen alone.

export const TARGET = "target";
export const ROOT = "root";
const NUM_STYLES = 7; // of style.css: .s0 to .s6
const KNOWN = ["context", "transition", "suffix", "ngram", "corpus"]; // keep their place in all answers

const places = new Map(KNOWN.map((name, place) => [name, place]));
const letters = new Map();

const MEANINGS = {
  context: "copied from the text so far",
  transition: "what the model found likely after this token before",
  suffix: "copied from a matching end of the text",
  ngram: "likely after the last few tokens",
  corpus: "found in a collection of texts",
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

// The first letter of its name that no other source has.
export function letterOf(source) {
  if (source === TARGET) return "★";
  if (source === ROOT) return "•";
  if (!letters.has(source)) {
    const taken = new Set(letters.values());
    const own = [...source.toUpperCase(), ..."ABCDEFGHIJKLMNOPQRSTUVWXYZ"].filter((letter) => /[A-Z0-9]/.test(letter));
    letters.set(source, own.find((letter) => !taken.has(letter)) ?? "?");
  }
  return letters.get(source);
}

export function nameOf(source) {
  return source === TARGET ? "the model" : source;
}

export function meaningOf(source) {
  return MEANINGS[source] ?? `suggested by ${source}`;
}
