// One answer of the model: text, reasoning, tool calls and timings.

import { render } from "./markdown.js";

const OPEN = "<think>";
const CLOSE = "</think>";
const STOP_REASONS = {
  stop: "The model ended its answer, or generated a stop string.",
  length: "The token limit was reached.",
  abort: "The server ended the request.",
  tool_calls: "The model called a tool.",
  stopped: "You stopped the answer.",
};

/** Split the content of an answer into leading reasoning and text. */
export function splitThought(content) {
  const text = content.trimStart();
  if (text.startsWith(OPEN)) {
    const end = text.indexOf(CLOSE);
    if (end < 0) return { thought: text.slice(OPEN.length), text: "" };
    return { thought: text.slice(OPEN.length, end), text: text.slice(end + CLOSE.length).trimStart() };
  }
  if (OPEN.startsWith(text)) return { thought: "", text: "" }; // the mark is still incomplete
  const end = text.indexOf(CLOSE); // some chat templates put the opening mark into the prompt
  const opened = text.indexOf(OPEN);
  if (end >= 0 && !(opened >= 0 && opened < end)) {
    return { thought: text.slice(0, end), text: text.slice(end + CLOSE.length).trimStart() };
  }
  return { thought: "", text: content };
}

/** An answer that grows while its events arrive. */
export class Answer {
  role = "assistant";
  calls = []; // { id, name, arguments }
  error = null;
  #content = "";
  #reasoning = "";
  #finish = null;
  #usage = null;
  #clock = { start: performance.now(), first: null, last: null, firstCount: 0, answering: null };
  #view = new AnswerView();
  #isDrawing = false;
  #countsCached;

  /** `countsCached`: the server reports the number of cached prompt tokens. */
  constructor({ countsCached }) {
    this.#countsCached = countsCached;
  }

  get element() {
    return this.#view.element;
  }

  /** The text without the reasoning. */
  get text() {
    return this.#parts().text;
  }

  get isEmpty() {
    return !this.#content && !this.#reasoning && !this.calls.length;
  }

  /** Add one event of the stream. */
  take(event) {
    const now = performance.now();
    const choice = event.choices?.[0];
    if (choice) {
      this.#takeDelta(choice.delta ?? {});
      this.#finish = choice.finish_reason ?? this.#finish;
    }
    if (event.usage) {
      this.#usage = event.usage;
      if (choice) this.#takeTime(now, event.usage.completion_tokens);
    }
    if (this.#clock.answering === null && this.#parts().text) this.#clock.answering = now;
    this.#drawSoon();
  }

  /** End the answer. `stopped`: the user stopped it; `error`: the error that ended it. */
  end({ stopped = false, error = null } = {}) {
    this.error = error;
    if (stopped) this.#finish = "stopped";
    this.#draw({ done: true });
  }

  /** Return the answer as a message of the next request. */
  message() {
    const { thought, text } = this.#parts();
    const message = { role: "assistant", content: text };
    if (thought.trim()) message.reasoning_content = thought.trim();
    if (this.calls.length) {
      message.tool_calls = this.calls.map(({ id, name, arguments: given }) => {
        return { id, type: "function", function: { name, arguments: given } };
      });
    }
    return message;
  }

  /** Ask the user for the result of every call; `send` gets all results in order when they are complete. */
  askResults(send) {
    const results = new Array(this.calls.length);
    let missing = this.calls.length;
    this.#view.askResults((place, result) => {
      results[place] = result;
      if (--missing === 0) send(results);
    });
  }

  #takeDelta(delta) {
    this.#content += delta.content ?? "";
    this.#reasoning += delta.reasoning_content ?? "";
    for (const piece of delta.tool_calls ?? []) {
      const call = (this.calls[piece.index ?? 0] ??= { id: null, name: "", arguments: "" });
      call.id ??= piece.id ?? null;
      call.name += piece.function?.name ?? "";
      call.arguments += piece.function?.arguments ?? "";
    }
  }

  #takeTime(now, count) {
    const clock = this.#clock;
    if (clock.first === null) {
      clock.first = now;
      clock.firstCount = count;
    }
    clock.last = now;
  }

  #parts() {
    const { thought, text } = splitThought(this.#content);
    return { thought: this.#reasoning + thought, text };
  }

  #figures() {
    const { start, first, last, firstCount } = this.#clock;
    const usage = this.#usage;
    if (!usage) return { finish: this.#finish };
    const more = usage.completion_tokens - firstCount;
    return {
      toFirstMs: first === null ? null : first - start,
      perSecond: more > 0 && last > first ? (more / (last - first)) * 1000 : null,
      prompt: usage.prompt_tokens,
      cached: usage.prompt_tokens_details?.cached_tokens ?? (this.#countsCached ? 0 : null),
      completion: usage.completion_tokens,
      finish: this.#finish,
    };
  }

  // Events may arrive faster than the screen refreshes.
  #drawSoon() {
    if (this.#isDrawing) return;
    this.#isDrawing = true;
    requestAnimationFrame(() => {
      if (this.#isDrawing) this.#draw();
    });
  }

  #draw({ done = false } = {}) {
    this.#isDrawing = false;
    const { thought, text } = this.#parts();
    const { first, answering } = this.#clock;
    const thoughtMs = answering !== null && first !== null ? answering - first : null;
    this.#view.show({ thought, text, thoughtMs, calls: this.calls, figures: this.#figures(), done });
    if (this.error) this.#view.fail(this.error.message);
    this.element.dispatchEvent(new CustomEvent("grown", { bubbles: true }));
  }
}

/** The elements of one answer. */
class AnswerView {
  constructor() {
    this.element = createElement("li", "message answer");
    this.element.setAttribute("aria-busy", "true");
    this.thought = createElement("details", "thought");
    this.thoughtTitle = createElement("summary");
    this.thoughtText = createElement("div", "thought-text");
    this.thought.append(this.thoughtTitle, this.thoughtText);
    this.thought.hidden = true;
    this.text = createElement("div", "text");
    this.text.dir = "auto";
    this.calls = createElement("div", "calls");
    this.figures = createElement("dl", "figures");
    const live = createElement("div");
    live.setAttribute("aria-live", "polite");
    live.append(this.thought, this.text, this.calls);
    this.element.append(live, this.figures);
  }

  show({ thought, text, thoughtMs, calls, figures, done }) {
    this.thought.hidden = !thought.trim();
    this.thoughtText.textContent = thought.trim();
    this.thoughtTitle.textContent =
      thoughtMs !== null ? `Thought for ${duration(thoughtMs)}` : done ? "Thought" : "Thinking";
    render(this.text, text);
    this.calls.replaceChildren(...calls.map(callCard));
    this.figures.replaceChildren(...figureRows(figures));
    this.element.setAttribute("aria-busy", String(!done));
  }

  fail(message) {
    const error = createElement("p", "error", message);
    error.setAttribute("role", "alert");
    this.figures.before(error);
  }

  askResults(give) {
    [...this.calls.children].forEach((card, place) => {
      const form = createElement("form", "row");
      const field = createElement("input");
      field.setAttribute("aria-label", `Result of ${card.dataset.name}`);
      field.placeholder = "Result";
      field.required = true;
      const button = createElement("button", "", "Submit result");
      form.append(field, button);
      form.addEventListener("submit", (event) => {
        event.preventDefault();
        form.replaceWith(createElement("p", "result", field.value));
        give(place, field.value);
      });
      card.append(form);
    });
    this.calls.querySelector("input")?.focus();
  }
}

function callCard({ name, arguments: given }) {
  const card = createElement("div", "call");
  card.dataset.name = name;
  card.append(createElement("span", "call-name", name), createElement("code", "", given));
  return card;
}

function figureRows({ toFirstMs, perSecond, prompt, cached, completion, finish }) {
  const rows = [
    ["first", "First token", toFirstMs == null ? null : duration(toFirstMs), "Time from sending to the first token."],
    ["speed", "Speed", perSecond == null ? null : `${rounded(perSecond)} tokens/s`, "Generation speed after the first token."],
    ["prompt", "Prompt", prompt, "Tokens of the conversation so far."],
    ["cached", "Cached", cached, "Prompt tokens that were read from the cache (counted with --enable-cache-report)."],
    ["answer", "Answer", completion, "Tokens of this answer."],
    ["finish", "Ended by", finish, STOP_REASONS[finish] ?? ""],
  ];
  return rows.filter(([, , value]) => value != null).map(([key, label, value, meaning]) => {
    const row = createElement("div");
    row.dataset.figure = key;
    row.title = meaning;
    row.append(createElement("dt", "", label), createElement("dd", "", String(value)));
    return row;
  });
}

function duration(ms) {
  return ms < 1000 ? `${Math.round(ms)} ms` : `${(ms / 1000).toFixed(ms < 10000 ? 2 : 1)} s`;
}

function rounded(value) {
  return value < 100 ? value.toFixed(1) : String(Math.round(value));
}

/** Create an element with a class and a text. */
export function createElement(name, className = "", text = "") {
  const element = document.createElement(name);
  element.className = className;
  element.textContent = text;
  return element;
}
