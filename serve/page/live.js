// The live page: shows the server's activity, updated every second.

import { createElement } from "./answer.js";
import { liveState } from "./stream.js";

const KEY = "penstock-key"; // in sessionStorage, shared with the chat page
const PERIOD_MS = 1000;
const PARTS = [
  // phase, and the times of a request at which it begins and ends
  ["tokenize", "arrived", "queued"],
  ["queue", "queued", "scheduled"],
  ["prefill", "scheduled", "first_token"],
  ["decode", "first_token", "ended"],
];

const part = (id) => document.getElementById(id);
const KEPT = 120; // samples of the charts, one per look
const CHARTS = [
  ["Tokens/s", (state) => state.tokens_per_s],
  ["Waiting requests", (state) => sum(state.replicas, "num_waiting")],
  ["Running requests", (state) => sum(state.replicas, "num_running")],
];
const samples = CHARTS.map(() => []);
let paused = false;
let timer = 0;

// --- display ---

function show(state) {
  part("model").textContent = state.model;
  fill(part("figures"), [
    figure("State", state.state),
    figure("Requests", state.num_requests),
    figure("Tokens/s", state.tokens_per_s),
    figure("Steps", state.num_steps),
    figure("Tokens", state.num_generated),
  ]);
  fill(part("history"), CHARTS.map(([name, value], index) => chart(name, samples[index], value(state))));
  fill(part("replicas"), state.replicas.map((replica, number) => replicaPart(replica, number, state.replicas.length)));
  const longest = Math.max(1e-6, ...state.requests.map(seconds));
  fill(part("requests"), state.requests.map((request) => requestRow(request, longest)));
  part("hidden").textContent = state.num_hidden
    ? `${state.num_hidden} more requests are not shown: they belong to other keys, or exceed the limit.`
    : "";
}

/** Return a line of a figure's last values, after adding `value` to them. */
function chart(name, kept, value) {
  kept.push(value);
  if (kept.length > KEPT) kept.shift();
  const most = Math.max(...kept, 1);
  const points = kept.map((each, index) => `${KEPT - kept.length + index},${100 - (100 * each) / most}`).join(" ");
  const element = part("chart").content.firstElementChild.cloneNode(true);
  element.dataset.chart = name;
  element.querySelector("figcaption").textContent = `${name}, at most ${Math.round(most)}`;
  element.querySelector("svg").setAttribute("aria-label", `${name}: now ${value}, at most ${most}`);
  element.querySelector("polyline").setAttribute("points", points);
  return element;
}

function sum(replicas, name) {
  return replicas.reduce((total, replica) => total + replica[name], 0);
}

function replicaPart(replica, number, count) {
  const element = createElement("section", "replica");
  element.append(createElement("h2", "", count > 1 ? `Replica ${number}` : "Batch and pages"));
  const figures = createElement("dl", "figures");
  figures.append(
    figure("Running", replica.num_running),
    figure("Waiting", replica.num_waiting),
    figure("Retracted", replica.num_retracted),
    figure("Pages in use", replica.pages.running),
    figure("of prefixes", replica.pages.prefix),
    figure("free", replica.pages.free),
  );
  const total = replica.pages.running + replica.pages.prefix + replica.pages.free;
  const bar = createElement("div", "bar");
  bar.append(
    piece("running-pages", replica.pages.running / total, `${replica.pages.running} pages of running requests`),
    piece("prefix-pages", replica.pages.prefix / total, `${replica.pages.prefix} cached pages of prefixes`),
  );
  element.append(figures, bar);
  if (replica.tree) element.append(treePart(replica.tree));
  return element;
}

function treePart({ nodes, num_nodes, texts = [] }) {
  const element = createElement("details", "prefix-tree");
  element.open = opened.has("tree");
  element.addEventListener("toggle", () => (element.open ? opened.add("tree") : opened.delete("tree")));
  element.append(createElement("summary", "", `Prefix tree, ${num_nodes} nodes`));
  const lists = [];
  const top = createElement("ul", "tree");
  for (const [index, [above, pages, locks]] of nodes.entries()) {
    const item = createElement("li", locks ? "locked" : "", above < 0 ? "root" : `${pages} pages${locks ? `, in use by ${locks}` : ""}`);
    if (texts[index]) item.append(createElement("q", "node-text", texts[index]));
    const list = createElement("ul", "tree");
    item.append(list);
    lists.push(list);
    (above < 0 ? top : lists[above]).append(item);
  }
  element.append(top);
  if (nodes.length < num_nodes) element.append(createElement("p", "hint", `${num_nodes - nodes.length} more`));
  return element;
}

const opened = new Set(); // ids of the details that the user opened

function requestRow(request, longest) {
  const row = createElement("tr");
  const name = createElement("td", "", request.rid);
  name.title = request.rid;
  row.append(
    name,
    createElement("td", "", request.finish || request.state),
    createElement("td", "", String(request.prompt_tokens)),
    createElement("td", "", String(request.cached_tokens)),
    createElement("td", "", String(request.output_tokens)),
    createElement("td", "", seconds(request).toFixed(2)),
  );
  const cell = createElement("td");
  const bar = createElement("div", "bar");
  for (const [kind, from, to] of PARTS) {
    const begun = request.ago_s[from];
    if (begun === null) continue;
    const length = begun - (request.ago_s[to] ?? request.ago_s.ended ?? 0);
    bar.append(piece(kind, length / longest, `${kind} ${length.toFixed(3)} s`));
  }
  cell.append(bar);
  row.append(cell);
  return row;
}

/** Return the bar from the request's arrival to its end, or to now. */
function seconds({ ago_s }) {
  return ago_s.arrived - (ago_s.ended ?? 0);
}

function piece(kind, share, title) {
  const element = createElement("span", kind);
  element.style.width = `${Math.min(100, Math.max(0, share * 100))}%`;
  element.title = title;
  return element;
}

function figure(name, value) {
  const element = createElement("div");
  element.dataset.figure = name;
  element.append(createElement("dt", "", name), createElement("dd", "", String(value)));
  return element;
}

function fill(element, children) {
  element.replaceChildren(...children);
}

// --- updates ---

async function look() {
  clearTimeout(timer);
  try {
    show(await liveState(sessionStorage.getItem(KEY), opened.has("tree")));
    part("trouble").textContent = "";
    part("key-form").hidden = true;
  } catch (error) {
    part("trouble").textContent = error.message;
    if (error.status === 401) {
      part("key-form").hidden = false;
      return; // the form asks for the key
    }
  }
  if (!paused && !document.hidden) timer = setTimeout(look, PERIOD_MS);
}

part("pause").addEventListener("click", () => {
  paused = !paused;
  part("pause").setAttribute("aria-pressed", String(paused));
  part("pause").textContent = paused ? "Resume" : "Pause";
  if (!paused) look();
});

part("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(KEY, part("key").value);
  part("key").value = "";
  look();
});

document.addEventListener("visibilitychange", () => {
  if (!document.hidden && !paused) look();
});

look();
