// One answer in the conversation: its tokens by source, its figures, and the plain run beside it.

import { count, make, number } from "./dom.js";
import { TARGET, letterOf, nameOf, styleOf } from "./sources.js";

// A request and all that has come of it so far.
export class Run {
  constructor(fields) {
    this.fields = fields;
    this.cycles = []; // each with `at`: seconds from admission to its end
    this.text = "";
    this.figures = null; // of the whole answer, by the server
    this.state = "running"; // or: done, stopped, failed
    this.plain = null; // the same request without a drafter
  }

  add(chunk) {
    const cycle = chunk.draftwood?.cycle;
    if (cycle) {
      cycle.at = (this.cycles.at(-1)?.at ?? 0) + cycle.seconds.total;
      cycle.finish = chunk.choices[0].finish_reason;
      this.cycles.push(cycle);
      this.text += cycle.tokens.map((token) => token.text).join("");
    } else if (chunk.usage) {
      this.figures = chunk.draftwood;
    }
  }

  get numTokens() {
    return this.cycles.reduce((sum, cycle) => sum + cycle.tokens.length, 0);
  }

  get tokensPerPass() {
    return this.cycles.length ? this.numTokens / this.cycles.length : 0;
  }

  // By the server's clock, without the prompt; while it runs, without the first pass.
  get speed() {
    if (this.figures) return this.figures.tokens_per_second;
    const seconds = this.cycles.length > 1 ? this.cycles.at(-1).at - this.cycles[0].at : 0;
    return seconds > 0 ? (this.numTokens - this.cycles[0].tokens.length) / seconds : 0;
  }
}

// Scrolls to an element within the nearest scrolling parent only: the page itself must not jump.
function reveal(element) {
  const parent = element.closest(".columns, .log");
  const box = [parent, parent.closest(".log")].find((each) => each.scrollHeight > each.clientHeight + 1);
  if (!box || getComputedStyle(box).overflowY === "visible") return;
  const inner = element.getBoundingClientRect(), outer = box.getBoundingClientRect();
  if (inner.bottom > outer.bottom - 12) box.scrollTop += inner.bottom - outer.bottom + 40;
  else if (inner.top < outer.top) box.scrollTop += inner.top - outer.top - 40;
}

// The text of a run: a span per cycle, a span per token.
class Text {
  constructor(onPick) {
    this.spans = [];
    this.shown = 0; // cycles before this one are not in the future
    this.element = make("div", {
      class: "tokens", dir: "auto",
      onclick: (event) => {
        const span = event.target.closest("[data-cycle]");
        if (span) onPick(Number(span.dataset.cycle));
      },
    });
  }

  add(cycle) {
    const span = make("span", { class: "cycle", "data-cycle": this.spans.length });
    for (const token of cycle.tokens) {
      if (!token.text) continue;
      const title = `${letterOf(token.source)} ${nameOf(token.source)}, cycle ${cycle.number}`;
      span.append(make("span", { class: `token ${styleOf(token.source)}`, title }, token.text));
    }
    this.spans.push(span);
    this.element.append(span);
  }

  // The cycle `current` is marked, and those after it are faint.
  mark(current, hideFuture) {
    this.element.querySelector(".now")?.classList.remove("now");
    this.spans[current]?.classList.add("now");
    if (this.spans[current]) reveal(this.spans[current]);
    const shown = hideFuture ? current + 1 : this.spans.length;
    for (let index = Math.min(shown, this.shown); index < this.spans.length; index += 1) {
      this.spans[index].classList.toggle("future", index >= shown);
    }
    this.shown = shown;
  }

  countBefore(run, at) {
    let index = 0;
    while (index < run.cycles.length && run.cycles[index].at <= at) index += 1;
    return index;
  }
}

export class AnswerView {
  constructor(run, { onPick, onSelect, onCompare }) {
    this.run = run;
    this.text = new Text((index) => onPick(this, index));
    this.plainText = null;
    this.figures = make("p", { class: "figures" });
    this.compare = make("button", { type: "button", class: "compare", hidden: true, onclick: () => onCompare(this) },
      "Compare with plain decoding");
    this.show = make("button", { type: "button", onclick: () => onSelect(this) }, "Show its trees");
    this.verdict = make("p", { class: "verdict", hidden: true });
    this.hint = make("p", { class: "hint", hidden: true },
      "No guesses would have paid here. To see trees anyway, set a budget in the settings, such as 16.");
    this.columns = make("div", { class: "columns" }, this._column(run, this.text));
    this.element = make("article", { class: "message assistant", "aria-label": "Answer", "aria-busy": "true" },
      this.columns, this.verdict, make("div", { class: "foot" }, this.figures, this.compare, this.show), this.hint);
  }

  _column(run, text) {
    return make("div", { class: "column" }, make("h3", {}, run.fields.drafter), text.element);
  }

  update(run) {
    const text = run === this.run ? this.text : this.plainText;
    for (let index = text.spans.length; index < run.cycles.length; index += 1) text.add(run.cycles[index]);
    const { run: own } = this;
    this.element.setAttribute("aria-busy", String(own.state === "running"));
    const parts = [count(own.numTokens, "token"), count(own.cycles.length, "pass")];
    if (own.numTokens) parts.push(`${number(own.tokensPerPass, 2)} tokens a pass`);
    if (own.speed) parts.push(`${number(own.speed)} tokens a second`);
    if (own.state === "stopped") parts.push("stopped");
    this.figures.textContent = parts.join(" · ");
    const wasFree = own.fields.drafter !== "plain" && own.fields.budget === undefined;
    this.hint.hidden = own.state !== "done" || !wasFree || own.cycles.some((cycle) => cycle.nodes.length > 1);
    this.compare.hidden = own.state !== "done" || own.plain !== null || own.fields.drafter === "plain" || !own.cycles.length;
    if (own.plain && own.plain.state !== "running") this._judge(own, own.plain);
  }

  startPlain(onPick) {
    this.plainText = new Text(onPick);
    this.columns.append(this._column(this.run.plain, this.plainText));
    this.columns.classList.add("two");
  }

  dropPlain() {
    this.columns.classList.remove("two");
    this.columns.lastChild.remove();
    this.plainText = null;
    this.run.plain = null;
  }

  _judge(own, plain) {
    const same = own.text === plain.text;
    this.verdict.hidden = false;
    this.verdict.classList.toggle("same", same);
    const ratio = plain.speed > 0 ? own.speed / plain.speed : 0;
    const speed = `${number(ratio, 2)}× the speed`;
    const passes = `${own.cycles.length} passes instead of ${plain.cycles.length}`;
    let place = 0;
    while (place < own.text.length && own.text[place] === plain.text[place]) place += 1;
    const equal = same ? "✓ identical text" : `✕ texts differ from character ${place + 1} on`;
    this.verdict.replaceChildren(make("strong", {}, speed), ` · ${passes} · `, make("b", {}, equal));
    if (!same) {
      const drawn = own.fields.temperature > 0 ? "With a temperature, drafters that draw their guesses use other random numbers; "
        + "the distribution is the same." : "In half precision, two tokens can be equally likely to the last bit.";
      this.verdict.append(make("span", { class: "hint" }, ` ${drawn}`));
    }
  }

  mark(current, hideFuture, at) {
    this.text.mark(current, hideFuture);
    if (this.plainText) {
      const reached = this.plainText.countBefore(this.run.plain, at);
      this.plainText.mark(hideFuture ? reached - 1 : -1, hideFuture && this.run.plain.state !== "running");
    }
  }

  sources() {
    const found = new Map(); // by source: guesses that were tried, and accepted ones
    const entry = (name) => found.get(name) ?? found.set(name, { tried: 0, kept: 0 }).get(name);
    for (const cycle of this.run.cycles) {
      for (const node of cycle.nodes.slice(1)) if (cycle.nodes[node.parent].accepted) entry(node.source).tried += 1;
      for (const token of cycle.tokens) entry(token.source).kept += 1;
    }
    const own = found.get(TARGET);
    found.delete(TARGET);
    return [...found, ...(own ? [[TARGET, own]] : [])];
  }
}
