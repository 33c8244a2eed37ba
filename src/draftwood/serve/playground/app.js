// The playground: a conversation, the cycles of its answers, and a player for them.

import { ApiError, getModel, streamChat } from "./api.js";
import { AnswerView, Run } from "./answer.js";
import { drawPasses, drawSpeeds } from "./chart.js";
import { find, make, number } from "./dom.js";
import { TARGET, letterOf, meaningOf, nameOf, styleOf } from "./sources.js";
import { describeCycle, describeNode, drawTree, fillTable } from "./tree.js";

const EXAMPLES = [
  ["Write a function", "Write a Python function that counts the words of a text, and then the same function with type "
    + "hints and a docstring."],
  ["Copy a text", "Repeat the text exactly: The quick brown fox jumps over the lazy dog. The dog sleeps in the garden, and "
    + "the fox runs home to its den in the forest."],
  ["Explain", "Explain in a few sentences how a tree grows."],
];
const STEP_SECONDS = 1.5; // of a slow replay
const THEMES = ["auto", "light", "dark"];

const state = {
  key: sessionStorage.getItem("key") ?? "",
  messages: [], // of the conversation, as they are sent
  views: [], // of its answers
  view: null, // the answer whose cycles are shown
  cycle: -1,
  follows: true, // whether the newest cycle is shown
  abort: null, // of the running request
  player: null,
};

// The model and the key

async function connect() {
  try {
    const model = await getModel(state.key);
    find("model").textContent = model.id;
    const drafters = [...new Set([model.drafter, ...model.drafters])];
    find("drafter").replaceChildren(...drafters.map((name) => make("option", { value: name },
      name === model.drafter ? `${name} (default)` : name)));
    find("budget").max = model.max_budget;
    find("budget").placeholder = `auto, up to ${model.max_budget}`;
    find("max-tokens").max = model.max_model_len;
    showError("");
    summarise();
    return true;
  } catch (error) {
    if (error.status === 401) askForKey(state.key ? error.message : "");
    else showError(error.message);
    find("model").textContent = "not connected";
    return false;
  }
}

function askForKey(problem) {
  find("open-key").hidden = false;
  find("key-error").textContent = problem;
  find("key-error").hidden = !problem;
  if (!find("key-dialog").open) find("key-dialog").showModal();
}

async function takeKey() {
  if (find("key-dialog").returnValue !== "ok") return;
  state.key = find("key").value.trim();
  sessionStorage.setItem("key", state.key);
  find("key").value = "";
  if (await connect()) find("prompt").focus();
}

// Requests

const whole = (id) => (find(id).value === "" ? undefined : Number(find(id).value));

function fieldsOf(messages) {
  const system = find("system").value.trim(), prediction = find("prediction").value;
  return {
    messages: system ? [{ role: "system", content: system }, ...messages] : [...messages],
    drafter: find("drafter").value,
    budget: whole("budget"),
    temperature: whole("temperature") ?? 0,
    max_tokens: whole("max-tokens"),
    seed: whole("seed") ?? Math.floor(Math.random() * 2 ** 31),
    prediction: prediction ? { type: "content", content: prediction } : undefined,
  };
}

async function stream(run, view) {
  state.abort = new AbortController();
  setBusy(true);
  let waits = false;
  const refresh = () => {
    waits = false;
    view.update(run);
    if (state.view === view) showRun(run === view.run);
  };
  try {
    for await (const chunk of streamChat(run.fields, state.key, state.abort.signal)) {
      run.add(chunk);
      if (!waits) requestAnimationFrame(refresh);
      waits = true;
    }
    run.state = "done";
  } catch (error) {
    run.state = error.name === "AbortError" ? "stopped" : "failed";
    if (run.state === "failed") {
      showError(error instanceof ApiError ? error.message : `The page failed: ${error.message}`);
      if (error.status === 401) askForKey(error.message);
    }
  } finally {
    state.abort = null;
    setBusy(false);
    refresh();
  }
}

async function ask(text) {
  if (state.abort || !text.trim()) return;
  showError("");
  find("welcome").hidden = true;
  state.messages.push({ role: "user", content: text });
  const run = new Run(fieldsOf(state.messages));
  const question = make("article", { class: "message user", "aria-label": "You" }, text);
  const view = new AnswerView(run, { onPick: pick, onSelect: select, onCompare: compare });
  find("log").append(question, view.element);
  question.scrollIntoView({ block: "nearest" });
  state.views.push(view);
  select(view);
  announce("Answering.");
  await stream(run, view);
  if (run.text) {
    state.messages.push({ role: "assistant", content: run.text });
  } else if (run.state !== "done") { // nothing came: the question goes back to the prompt
    state.messages.pop();
    state.views.pop();
    question.remove();
    view.element.remove();
    find("prompt").value ||= text;
    select(state.views.at(-1) ?? null);
    return;
  }
  announce(`${run.state === "done" ? "Answer complete" : "Stopped"}: ${view.figures.textContent}. ${run.text}`);
}

async function compare(view) {
  if (state.abort || view.compare.hidden) return;
  showError("");
  select(view);
  stop();
  const plain = new Run({ ...view.run.fields, drafter: "plain", budget: undefined, prediction: undefined });
  view.run.plain = plain;
  view.startPlain((index) => pickTime(view, plain.cycles[index].at));
  announce("Running the same request without a drafter.");
  await stream(plain, view);
  if (plain.state !== "done") {
    view.dropPlain();
    view.update(view.run);
  } else {
    announce(view.verdict.textContent);
    view.verdict.scrollIntoView({ block: "nearest" });
  }
  showRun(false);
}

function setBusy(busy) {
  find("send").hidden = busy;
  find("stop").hidden = !busy;
  if (!busy && document.activeElement === document.body) find("prompt").focus({ preventScroll: true });
}

// The shown cycle

function select(view) {
  stop();
  state.view?.mark(-1, false, 0);
  for (const each of state.views) each.element.classList.toggle("selected", each === view);
  state.view = view;
  state.follows = true;
  state.cycle = -1;
  showRun(true);
}

function pick(view, index) {
  if (view !== state.view) select(view);
  stop();
  goTo(index);
}

function pickTime(view, at) {
  const index = view.run.cycles.findIndex((cycle) => cycle.at >= at);
  pick(view, index < 0 ? view.run.cycles.length - 1 : index);
}

function showRun(moves) {
  const run = state.view?.run, cycles = run?.cycles ?? [];
  find("f-pass").textContent = cycles.length ? number(run.tokensPerPass, 2) : "–";
  find("f-speed").textContent = run?.speed ? number(run.speed) : "–";
  find("f-tokens").textContent = cycles.length ? run.numTokens : "–";
  find("f-passes").textContent = cycles.length || "–";
  find("pass-note").textContent = cycles.length ? `mean ${number(run.tokensPerPass, 2)}` : "";
  find("chart-note").textContent = run?.plain ? "dashed: plain decoding" : "";
  find("scrub").max = Math.max(1, cycles.length);
  for (const id of ["scrub", "first", "back", "play", "next", "last"]) find(id).disabled = !cycles.length;
  showLegend();
  if (moves && state.follows && cycles.length) state.cycle = cycles.length - 1;
  showCycle(false);
}

function goTo(index) {
  const cycles = state.view?.run.cycles ?? [];
  if (!cycles.length) return;
  state.cycle = Math.min(cycles.length - 1, Math.max(0, index));
  state.follows = state.cycle === cycles.length - 1 && state.view.run.state === "running";
  showCycle(state.player?.mode === "step");
  if (!state.player) announce(`Cycle ${state.cycle + 1}. ${describeCycle(cycles[state.cycle])}`);
}

function showCycle(animate) {
  const run = state.view?.run, cycle = run?.cycles[state.cycle];
  const container = find("tree");
  drawCharts();
  if (!cycle) {
    container.replaceChildren(make("p", { class: "empty" }, run ? "Waiting for the first pass …" : "No answer yet."));
    find("cycle-title").textContent = "Tree";
    find("cycle-text").textContent = "The tree of each pass appears here.";
    find("node-text").textContent = "";
    find("node-rows").replaceChildren();
    return;
  }
  find("cycle-title").textContent = `Cycle ${state.cycle + 1} of ${run.cycles.length}`;
  find("cycle-text").textContent = describeCycle(cycle);
  find("scrub").value = state.cycle + 1;
  find("scrub").setAttribute("aria-valuetext", `cycle ${state.cycle + 1} of ${run.cycles.length}`);
  const { draft, verify, total } = cycle.seconds;
  const ms = (seconds) => `${number(1000 * seconds)} ms`;
  find("node-text").textContent = `${ms(total)}: drafting ${ms(draft)}, the model ${ms(verify)}. Select a node for its figures.`;
  drawTree(cycle, container, (node) => { find("node-text").textContent = describeNode(node); }, animate);
  if (find("nodes").open) fillTable(cycle, find("node-rows"));
  const live = run.state === "running" && state.follows;
  state.view.mark(state.cycle, !live && state.cycle < run.cycles.length - 1, cycle.at);
}

function drawCharts() {
  const run = state.view?.run ?? new Run({});
  const onPick = (index) => pick(state.view, index);
  drawPasses(find("chart-pass"), run.cycles, state.cycle, onPick);
  drawSpeeds(find("chart-speed"), run, state.cycle, onPick);
}

function showLegend() {
  const sources = state.view?.sources() ?? [];
  find("legend").replaceChildren(...sources.map(([name, { tried, kept }]) => make("li", { title: meaningOf(name) },
    make("span", { class: `tag ${styleOf(name)}`, "aria-hidden": "true" }, letterOf(name)),
    make("span", { class: `token ${styleOf(name)}` }, nameOf(name)),
    make("span", { class: "hint" }, name === TARGET ? `${kept}` : `${kept} of ${tried} tried`))));
}

// The player

function play() {
  const run = state.view?.run;
  if (!run?.cycles.length) return;
  if (state.player) {
    stop();
    return;
  }
  const mode = find("speed").value, last = run.cycles.length - 1;
  const start = state.cycle >= last ? 0 : state.cycle;
  state.player = { mode, timer: 0 };
  find("play").textContent = "Pause";
  find("play").setAttribute("aria-label", "Pause");
  if (mode === "step") stepOn(start);
  else runOn(Number(mode), start);
}

function stepOn(index) {
  goTo(index);
  const { cycles } = state.view.run, { player } = state;
  if (index >= cycles.length - 1) {
    stop();
    return;
  }
  const seconds = STEP_SECONDS + 0.12 * cycles[index].tokens.length;
  player.timer = setTimeout(() => stepOn(index + 1), 1000 * seconds);
}

// By the recorded times, together with the plain run if there is one.
function runOn(speed, start) {
  const { view, player } = state, { run } = view;
  const end = Math.max(run.cycles.at(-1).at, run.plain?.cycles.at(-1)?.at ?? 0);
  const offset = start === 0 ? 0 : run.cycles[start].at;
  let began = null;
  const frame = (now) => {
    if (state.player !== player) return;
    began ??= now;
    const at = offset + speed * (now - began) / 1000;
    const index = run.cycles.findLastIndex((cycle) => cycle.at <= at);
    if (index !== state.cycle && index >= 0) goTo(index);
    view.mark(index, true, at);
    if (at >= end) stop();
    else player.timer = requestAnimationFrame(frame);
  };
  player.timer = requestAnimationFrame(frame);
}

function stop() {
  if (!state.player) return;
  clearTimeout(state.player.timer);
  cancelAnimationFrame(state.player.timer);
  state.player = null;
  find("play").textContent = "Replay";
  find("play").setAttribute("aria-label", "Replay");
  showCycle(false);
}

const stepBy = (steps) => {
  stop();
  goTo(state.cycle + steps);
};

// The page

function showError(text) {
  find("error").textContent = text;
  find("error").hidden = !text;
}

const announce = (text) => { find("status").textContent = text; };

function summarise() {
  const parts = [find("drafter").value, `temperature ${find("temperature").value || 0}`];
  if (find("budget").value) parts.push(`budget ${find("budget").value}`);
  if (find("prediction").value) parts.push("with a prediction");
  find("settings-summary").textContent = parts.filter(Boolean).join(", ");
}

function setTheme(theme) {
  if (theme === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  localStorage.setItem("theme", theme);
  find("theme").textContent = theme[0].toUpperCase() + theme.slice(1);
  find("theme").setAttribute("aria-label", `Colours: ${theme === "auto" ? "as the system" : theme}`);
}

function clear() {
  state.abort?.abort();
  select(null);
  for (const message of find("log").querySelectorAll(".message")) message.remove();
  Object.assign(state, { messages: [], views: [] });
  find("welcome").hidden = false;
  showError("");
  find("prompt").focus();
}

function onKey(event) {
  if (event.ctrlKey || event.altKey || event.metaKey || document.querySelector("dialog[open]")) return;
  if (event.key === "Escape") {
    if (state.abort) state.abort.abort();
    else document.activeElement.blur();
    stop();
    return;
  }
  const target = event.target;
  if (target.matches("input, textarea, select")) return;
  const onButton = target.matches("button, summary");
  const actions = {
    ArrowLeft: () => stepBy(-1), ArrowRight: () => stepBy(1), Home: () => stepBy(-1e9), End: () => stepBy(1e9),
    "/": () => find("prompt").focus(), "?": () => find("help").showModal(),
    c: () => state.view && compare(state.view), " ": onButton ? null : play,
  };
  const action = actions[event.key];
  if (action) {
    event.preventDefault();
    action();
  }
}

function start() {
  find("examples").append(...EXAMPLES.map(([name, text]) => make("button", { type: "button", class: "example",
    onclick: () => ask(text) }, make("b", {}, name), make("span", {}, text))));
  find("ask").addEventListener("submit", (event) => {
    event.preventDefault();
    const text = find("prompt").value;
    if (state.abort || !text.trim()) return;
    find("prompt").value = "";
    ask(text);
  });
  find("prompt").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      find("ask").requestSubmit();
    }
  });
  const clicks = {
    stop: () => state.abort?.abort(), "new-chat": clear, first: () => stepBy(-1e9), back: () => stepBy(-1),
    next: () => stepBy(1), last: () => stepBy(1e9), play, "open-help": () => find("help").showModal(),
    "open-key": () => askForKey(""),
    theme: () => setTheme(THEMES[(THEMES.indexOf(localStorage.getItem("theme") ?? "auto") + 1) % THEMES.length]),
  };
  for (const [id, action] of Object.entries(clicks)) find(id).addEventListener("click", action);
  find("scrub").addEventListener("input", () => {
    stop();
    goTo(Number(find("scrub").value) - 1);
  });
  find("nodes").addEventListener("toggle", () => showCycle(false));
  find("key-dialog").addEventListener("close", takeKey);
  find("settings").addEventListener("input", summarise);
  document.addEventListener("keydown", onKey);
  let width = 0;
  new ResizeObserver(([{ contentRect }]) => { // drawings change the height
    if (contentRect.width !== width && !state.player) showCycle(false);
    width = contentRect.width;
  }).observe(find("view"));
  setTheme(localStorage.getItem("theme") ?? "auto");
  showRun(true);
  connect();
}

start();
