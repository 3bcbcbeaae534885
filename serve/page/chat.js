// The chat page: the conversation, the composer and the settings.

import { Answer, createElement } from "./answer.js";
import { asCurl, asPython } from "./code.js";
import { render } from "./markdown.js";
import { keepFields, saveChat, savedChat } from "./saved.js";
import { complete, serverInfo } from "./stream.js";

const KEY = "penstock-key"; // in sessionStorage: deleted when the tab is closed
const NEAR_PX = 80; // within this distance from the end, the page follows the answer
const EXAMPLE_TOOLS = [
  exampleTool("get_weather", "Get the weather of a city."),
  exampleTool("get_time", "Get the time in a city."),
];

const EXAMPLE_SCHEMA = {
  type: "object",
  properties: { answer: { type: "string" }, sure: { type: "boolean" } },
  required: ["answer", "sure"],
  additionalProperties: false,
};

const part = (id) => document.getElementById(id);
const [log, scroller, prompt, composer] = ["log", "scroller", "prompt", "composer"].map(part);
const wide = matchMedia("(min-width: 64rem)");

let turns = []; // { role: "user" | "tool", message, element } and Answers, in the order of the log
let running = null; // the AbortController of the running answer
let edited = null; // the turn that the composer's text will replace
let server = {}; // facts about the server
let lastBody = null; // the body of the last request
let attached = []; // data URLs of the images that the next message will hold
let follows = true; // the page scrolls along with the growing answer

function exampleTool(name, description) {
  const parameters = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };
  return { type: "function", function: { name, description, parameters } };
}

// --- the conversation ---

function say(text) {
  const settings = readSettings();
  if (!settings) return;
  prompt.value = "";
  fitPrompt();
  if (edited) dropFrom(edited);
  stopEditing();
  const images = attached.map((url) => ({ type: "image_url", image_url: { url } }));
  const content = images.length ? [...images, ...(text ? [{ type: "text", text }] : [])] : text;
  attach([]);
  addQuestion(content);
  answer(settings);
}

/** Show a message of the user: a text, or parts with texts and images. */
function addQuestion(content) {
  const { text, urls } = partsOf(content);
  const element = createElement("li", "message user");
  const bubble = createElement("div", "text");
  render(bubble, text);
  bubble.dir = "auto";
  for (const url of urls) bubble.prepend(picture(url));
  element.append(bubble);
  add({ role: "user", message: { role: "user", content }, element });
}

function partsOf(content) {
  const parts = typeof content === "string" ? [{ type: "text", text: content }] : content;
  return {
    text: parts.find((each) => each.type === "text")?.text ?? "",
    urls: parts.filter((each) => each.type === "image_url").map((each) => each.image_url.url),
  };
}

function addResult(message) {
  const element = createElement("li", "tool");
  element.hidden = true; // the call's card shows the result
  add({ role: "tool", message, element });
}

/** Show the conversation that this tab had before it was loaded again. */
function restore() {
  for (const message of savedChat()) {
    if (message.role === "user") addQuestion(message.content);
    else if (message.role === "tool") addResult(message);
    else {
      const reply = new Answer({ countsCached: false });
      add(reply);
      const calls = message.tool_calls?.map((call, index) => ({ index, id: call.id, function: call.function }));
      reply.take({ choices: [{ delta: { ...message, tool_calls: calls } }] });
      reply.end();
    }
  }
  if (turns.length) showState("");
  scrollToEnd();
}

// --- images ---

function picture(url) {
  const image = createElement("img", "picture");
  image.src = url;
  image.alt = "Attached image";
  return image;
}

/** Show these images above the composer, each with a button that removes it. */
function attach(urls) {
  attached = urls;
  const shown = urls.map((url, index) => {
    const item = createElement("span", "attachment");
    const remove = createElement("button", "link", "Remove");
    remove.type = "button";
    remove.addEventListener("click", () => attach(attached.toSpliced(index, 1)));
    item.append(picture(url), remove);
    return item;
  });
  part("attachments").replaceChildren(...shown);
  part("attachments").hidden = !urls.length;
}

/** Attach the images among these files, if the model sees. Return whether there was one. */
function takeFiles(files) {
  const images = [...files].filter((file) => file.type.startsWith("image/"));
  if (!images.length) return false;
  if (!server.has_image_understanding) {
    part("status").textContent = part("notice").textContent = "This model does not take images.";
    return true;
  }
  part("notice").textContent = "";
  for (const file of images) {
    const reader = new FileReader();
    reader.addEventListener("load", () => attach([...attached, reader.result]));
    reader.readAsDataURL(file);
  }
  return true;
}

function add(turn) {
  turns.push(turn);
  log.append(turn.element);
  part("welcome").hidden = true;
}

function dropFrom(turn) {
  for (const dropped of turns.splice(turns.indexOf(turn))) dropped.element.remove();
}

async function answer(settings) {
  const request = { ...settings.body, messages: messages(settings.system) };
  lastBody = request;
  const controller = new AbortController();
  const reply = new Answer({ countsCached: server.cache_report === true });
  running = controller;
  add(reply);
  showState("Answering.");
  follows = true;
  scrollToEnd();
  try {
    for await (const event of complete(request, { key: key(), signal: controller.signal })) reply.take(event);
    reply.end();
  } catch (error) {
    reply.end(error.name === "AbortError" ? { stopped: true } : { error });
  }
  if (running !== controller) return; // the user started another conversation
  running = null;
  showState(reply.error ? "" : "The answer has ended.");
  if (reply.error?.status === 401) askKey();
  if (reply.calls.length && !reply.error) {
    reply.askResults((results) => giveResults(reply, results, settings));
  }
}

function giveResults(reply, results, settings) {
  reply.calls.forEach(({ id }, place) => {
    const message = { role: "tool", tool_call_id: id, content: results[place] };
    addResult(message);
  });
  answer(settings);
}

/** Return the conversation in the API's format, without questions whose answers failed. */
function messages(system) {
  const sent = system ? [{ role: "system", content: system }] : [];
  const lastOf = (role) => sent.at(-1)?.role === role;
  for (const turn of turns) {
    if (turn.role !== "assistant") sent.push(turn.message);
    else if (!turn.error || !turn.isEmpty) sent.push(turn.message());
    else while (lastOf("user") || lastOf("tool")) sent.pop();
  }
  return sent;
}

/** Return the settings as { system, body }, or null after showing an error for an invalid field. */
function readSettings() {
  const body = {
    stream: true,
    stream_options: { include_usage: true, continuous_usage_stats: true },
    chat_template_kwargs: { enable_thinking: part("thinking").checked },
  };
  const problem = addNumbers(body) || addTools(body) || addSchema(body);
  part("settings-error").textContent = problem;
  if (!problem) return { system: part("system").value.trim(), body };
  showSettings(true);
  return null;
}

function addNumbers(body) {
  for (const id of ["temperature", "top-p", "seed", "max-tokens"]) {
    const field = part(id);
    if (!field.checkValidity()) return `${field.labels[0].textContent}: ${field.validationMessage}`;
    if (field.value !== "") body[id.replace("-", "_")] = Number(field.value);
  }
  return "";
}

function addTools(body) {
  if (!part("offer-tools").checked) return "";
  try {
    body.tools = JSON.parse(part("tools").value);
  } catch (error) {
    return `The tools are not valid JSON: ${error.message}`;
  }
  return "";
}

function addSchema(body) {
  if (!part("use-schema").checked) return "";
  try {
    const schema = JSON.parse(part("schema").value);
    body.response_format = { type: "json_schema", json_schema: { name: "answer", schema } };
  } catch (error) {
    return `The schema is not valid JSON: ${error.message}`;
  }
  return "";
}

function retry() {
  const settings = readSettings();
  if (!settings) return;
  stopEditing();
  dropFrom(turns.at(-1));
  answer(settings);
}

function edit(turn) {
  edited = turn;
  turn.element.classList.add("edited");
  part("editing").hidden = false;
  const { text, urls } = partsOf(turn.message.content);
  prompt.value = text;
  attach(urls);
  fitPrompt();
  prompt.focus();
}

function stopEditing() {
  if (!edited) return;
  edited.element.classList.remove("edited");
  edited = null;
  part("editing").hidden = true;
  prompt.value = "";
  fitPrompt();
}

function stop() {
  running?.abort();
}

function newChat() {
  stop();
  running = null;
  stopEditing();
  attach([]);
  turns = [];
  log.replaceChildren();
  part("welcome").hidden = false;
  showState("");
  prompt.focus();
}

// --- display ---

function showState(status) {
  part("status").textContent = status;
  part("send").hidden = running !== null;
  part("stop").hidden = running === null;
  document.body.classList.toggle("running", running !== null);
  if (running === null) saveChat(messages(""));
  offerActions();
}

/** Show Edit below the user's last message, and Retry and copies below the last answer; hidden during an answer. */
function offerActions() {
  for (const old of log.querySelectorAll(".actions")) old.remove();
  if (!turns.length) return;
  const asked = turns.findLast((turn) => turn.role === "user");
  offer(asked, { Edit: () => edit(asked) });
  const last = turns.at(-1);
  // Browsers disable the clipboard on pages that another machine serves over plain HTTP.
  const acts = { Retry: retry };
  if (navigator.clipboard && lastBody) {
    acts["Copy as curl"] = (event) => copy(event, asCurl(lastBody, Boolean(key())));
    acts["Copy as Python"] = (event) => copy(event, asPython(lastBody, Boolean(key())));
  }
  if (navigator.clipboard && last.text) acts.Copy = (event) => copy(event, last.text);
  offer(last, acts);
}

function offer(turn, acts) {
  const row = createElement("div", "actions");
  for (const [name, act] of Object.entries(acts)) {
    const button = createElement("button", "link", name);
    button.type = "button";
    button.addEventListener("click", act);
    row.append(button);
  }
  turn.element.append(row);
}

async function copy(event, text) {
  const button = event.currentTarget;
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
  } catch {
    button.textContent = "Not allowed by the browser";
  }
}

function isAtEnd() {
  return scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight < NEAR_PX;
}

function scrollToEnd() {
  scroller.scrollTop = scroller.scrollHeight;
}

function fitPrompt() {
  prompt.style.height = "auto";
  prompt.style.height = `${prompt.scrollHeight}px`;
}

function showSettings(visible) {
  part("settings").hidden = !visible;
  part("show-settings").setAttribute("aria-expanded", String(visible));
  if (visible && !wide.matches) part("hide-settings").focus();
}

function hideSettings() {
  showSettings(false);
  part("show-settings").focus();
}

// --- the API key ---

function key() {
  return sessionStorage.getItem(KEY);
}

function askKey() {
  part("key-label").textContent = key()
    ? "The server did not accept this API key."
    : "This server requires an API key.";
  part("key-form").hidden = false;
  part("key").focus();
}

async function useKey() {
  sessionStorage.setItem(KEY, part("key").value);
  part("key").value = "";
  part("key-form").hidden = true;
  prompt.focus();
  await meetServer();
  if (part("key-form").hidden && turns.at(-1)?.error?.status === 401) retry();
}

async function meetServer() {
  try {
    server = await serverInfo(key());
    part("model").textContent = server.served_model_name ?? "";
  } catch (error) {
    if (error.status === 401) askKey();
    else part("status").textContent = error.message;
  }
}

// --- user actions ---

composer.addEventListener("submit", (event) => {
  event.preventDefault();
  const text = prompt.value.trim();
  if ((text || attached.length) && !running) say(text);
});
prompt.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  composer.requestSubmit();
});
prompt.addEventListener("input", fitPrompt);
prompt.addEventListener("paste", (event) => {
  if (takeFiles(event.clipboardData.files)) event.preventDefault();
});
document.addEventListener("dragover", (event) => event.preventDefault());
document.addEventListener("drop", (event) => {
  event.preventDefault();
  takeFiles(event.dataTransfer.files);
});
addEventListener("resize", fitPrompt);
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || event.isComposing) return;
  if (running) stop();
  else if (edited) cancelEdit();
  else if (!part("settings").hidden && !wide.matches) hideSettings();
});

function cancelEdit() {
  stopEditing();
  attach([]);
  prompt.focus();
}

// After the user scrolls away, the page stops following the answer.
scroller.addEventListener("scroll", () => (follows = isAtEnd()));
log.addEventListener("grown", () => follows && scrollToEnd());

for (const example of document.querySelectorAll(".example")) {
  example.addEventListener("click", () => {
    say(example.textContent);
    prompt.focus();
  });
}
part("stop").addEventListener("click", () => {
  stop();
  prompt.focus();
});
part("new-chat").addEventListener("click", newChat);
part("cancel-edit").addEventListener("click", cancelEdit);
part("show-settings").addEventListener("click", () => showSettings(part("settings").hidden));
part("hide-settings").addEventListener("click", hideSettings);
part("offer-tools").addEventListener("change", (event) => (part("tools-part").hidden = !event.target.checked));
part("use-schema").addEventListener("change", (event) => (part("schema-part").hidden = !event.target.checked));
part("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  useKey();
});

part("tools").value = JSON.stringify(EXAMPLE_TOOLS, null, 2);
part("schema").value = JSON.stringify(EXAMPLE_SCHEMA, null, 2);
wide.addEventListener("change", () => showSettings(wide.matches));
keepFields([...document.querySelectorAll("#settings input, #settings textarea")]);
showSettings(wide.matches);
restore();
meetServer();
