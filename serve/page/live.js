// The live page: asks the server every second what it does, and shows it.

import { made } from "./answer.js";
import { liveState } from "./stream.js";

const KEY = "penstock-key"; // in sessionStorage, as on the chat page
const PERIOD_MS = 1000;
const PARTS = [
  // name, and between which of a request's times it lies
  ["tokenize", "arrived", "queued"],
  ["queue", "queued", "scheduled"],
  ["prefill", "scheduled", "first_token"],
  ["decode", "first_token", "ended"],
];

const part = (id) => document.getElementById(id);
let paused = false;
let timer = 0;

// --- what is shown ---

function show(state) {
  part("model").textContent = state.model;
  fill(part("figures"), [
    figure("State", state.state),
    figure("Requests", state.num_requests),
    figure("Tokens/s", state.tokens_per_s),
    figure("Steps", state.num_steps),
    figure("Tokens", state.num_generated),
  ]);
  fill(part("replicas"), state.replicas.map((replica, number) => replicaPart(replica, number, state.replicas.length)));
  const longest = Math.max(1e-6, ...state.requests.map(seconds));
  fill(part("requests"), state.requests.map((request) => requestRow(request, longest)));
  part("hidden").textContent = state.num_hidden
    ? `${state.num_hidden} more are not shown: they are another key's, or too many.`
    : "";
}

function replicaPart(replica, number, count) {
  const element = made("section", "replica");
  element.append(made("h2", "", count > 1 ? `Replica ${number}` : "Batch and pages"));
  const figures = made("dl", "figures");
  figures.append(
    figure("Running", replica.num_running),
    figure("Waiting", replica.num_waiting),
    figure("Retracted", replica.num_retracted),
    figure("Pages in use", replica.pages.running),
    figure("of prefixes", replica.pages.prefix),
    figure("free", replica.pages.free),
  );
  const total = replica.pages.running + replica.pages.prefix + replica.pages.free;
  const bar = made("div", "bar");
  bar.append(
    piece("running-pages", replica.pages.running / total, `${replica.pages.running} pages of running requests`),
    piece("prefix-pages", replica.pages.prefix / total, `${replica.pages.prefix} pages kept for their prefix`),
  );
  element.append(figures, bar);
  if (replica.tree) element.append(treePart(replica.tree));
  return element;
}

function treePart({ nodes, num_nodes }) {
  const element = made("details", "prefix-tree");
  element.open = opened.has("tree");
  element.addEventListener("toggle", () => (element.open ? opened.add("tree") : opened.delete("tree")));
  element.append(made("summary", "", `Prefix tree, ${num_nodes} nodes`));
  const lists = [];
  const top = made("ul", "tree");
  for (const [above, pages, locks] of nodes) {
    const item = made("li", locks ? "locked" : "", above < 0 ? "root" : `${pages} pages${locks ? `, in use by ${locks}` : ""}`);
    const list = made("ul", "tree");
    item.append(list);
    lists.push(list);
    (above < 0 ? top : lists[above]).append(item);
  }
  element.append(top);
  if (nodes.length < num_nodes) element.append(made("p", "hint", `${num_nodes - nodes.length} more`));
  return element;
}

const opened = new Set(); // what the reader unfolded stays so

function requestRow(request, longest) {
  const row = made("tr");
  const name = made("td", "", request.rid);
  name.title = request.rid;
  row.append(
    name,
    made("td", "", request.finish || request.state),
    made("td", "", String(request.prompt_tokens)),
    made("td", "", String(request.cached_tokens)),
    made("td", "", String(request.output_tokens)),
    made("td", "", seconds(request).toFixed(2)),
  );
  const cell = made("td");
  const bar = made("div", "bar");
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

/** From the request's arrival to its end, or to now. */
function seconds({ ago_s }) {
  return ago_s.arrived - (ago_s.ended ?? 0);
}

function piece(kind, share, title) {
  const element = made("span", kind);
  element.style.width = `${Math.min(100, Math.max(0, share * 100))}%`;
  element.title = title;
  return element;
}

function figure(name, value) {
  const element = made("div");
  element.dataset.figure = name;
  element.append(made("dt", "", name), made("dd", "", String(value)));
  return element;
}

function fill(element, children) {
  element.replaceChildren(...children);
}

// --- when ---

async function look() {
  clearTimeout(timer);
  try {
    show(await liveState(sessionStorage.getItem(KEY)));
    part("trouble").textContent = "";
    part("key-form").hidden = true;
  } catch (error) {
    part("trouble").textContent = error.message;
    if (error.status === 401) {
      part("key-form").hidden = false;
      return; // the key's form asks again
    }
  }
  if (!paused && !document.hidden) timer = setTimeout(look, PERIOD_MS);
}

part("pause").addEventListener("click", () => {
  paused = !paused;
  part("pause").setAttribute("aria-pressed", String(paused));
  part("pause").textContent = paused ? "Go on" : "Pause";
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
