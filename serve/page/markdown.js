// A small part of Markdown as DOM nodes: paragraphs, headings, lists, code blocks, inline marks.
// Text is set through textContent only, so it is never parsed as HTML.

/** Show `text` in `container`. If called again with a longer text, only changed blocks are replaced. */
export function render(container, text) {
  const blocks = blocksOf(text);
  const shown = sources.get(container) ?? [];
  let same = 0;
  while (same < Math.min(blocks.length, shown.length) && blocks[same].source === shown[same]) same++;
  while (container.childNodes.length > same) container.lastChild.remove();
  for (const { lines, make } of blocks.slice(same)) container.append(make(lines));
  sources.set(container, blocks.map((block) => block.source));
}

const sources = new WeakMap(); // container -> the source of each of its blocks

const FENCE = /^ {0,3}(`{3,}|~{3,})[^`]*$/;
const HEADING = /^#{1,6}\s+(?=\S)/;
const ITEM = /^\s*(?:[-*+]|(\d{1,9})[.)])\s+(?=\S)/;

/** [{ lines, make, source }]: the lines of each block, and the function that creates its element. */
function blocksOf(text) {
  const lines = text.replaceAll("\r\n", "\n").split("\n");
  const blocks = [];
  let start = 0;
  while (start < lines.length) {
    const [make, end] = blockAt(lines, start);
    const own = lines.slice(start, end);
    if (make) blocks.push({ lines: own, make, source: own.join("\n") });
    start = end;
  }
  return blocks;
}

/** Return the block that starts at this line, and the line after it. */
function blockAt(lines, start) {
  const first = lines[start];
  const until = (ends) => {
    let end = start + 1;
    while (end < lines.length && !ends(lines[end])) end++;
    return end;
  };
  const fence = FENCE.exec(first);
  if (fence) return [codeBlock, until((line) => line.trim() === fence[1]) + 1];
  if (isBlank(first)) return [null, start + 1];
  if (HEADING.test(first)) return [heading, start + 1];
  if (ITEM.test(first)) {
    const numbered = isNumbered(first);
    const isOther = (line) => ITEM.test(line) && isNumbered(line) !== numbered;
    return [list, until((line) => isBlank(line) || FENCE.test(line) || HEADING.test(line) || isOther(line))];
  }
  return [paragraph, until((line) => isBlank(line) || FENCE.test(line) || HEADING.test(line) || ITEM.test(line))];
}

const isBlank = (line) => line.trim() === "";
const isNumbered = (line) => ITEM.exec(line)[1] !== undefined;

function codeBlock(lines) {
  const closed = lines.length > 1 && lines.at(-1).trim() === FENCE.exec(lines[0])[1];
  const code = element("code", lines.slice(1, closed ? -1 : undefined).join("\n"));
  const block = element("pre");
  block.tabIndex = 0; // so that a keyboard can scroll it
  block.append(code);
  return block;
}

function paragraph(lines) {
  return withInline(element("p"), lines.join("\n"));
}

function heading([line]) {
  const bold = withInline(element("strong"), line.replace(HEADING, ""));
  const block = element("p");
  block.append(bold);
  return block;
}

function list(lines) {
  const number = ITEM.exec(lines[0])[1];
  const block = element(number === undefined ? "ul" : "ol");
  if (number !== undefined) block.start = Number(number);
  const items = [];
  for (const line of lines) {
    if (ITEM.test(line)) items.push(line.replace(ITEM, ""));
    else items.push(`${items.pop()}\n${line.trim()}`);
  }
  for (const item of items) block.append(withInline(element("li"), item));
  return block;
}

/** Append `text` to `parent`, with its inline marks. Always takes time linear in the text. */
function withInline(parent, text) {
  const marks = [...text.matchAll(/`+|\*\*|(?<!\w)\*(?=\S)|(?<=\S)\*(?!\w)/g)];
  const partners = partnersOf(marks.map((mark) => mark[0]));
  let done = 0;
  for (let place = 0; place < marks.length; place++) {
    const [mark] = marks[place];
    const partner = partners[place];
    const start = marks[place].index + mark.length;
    const inner = partner === undefined ? "" : text.slice(start, marks[partner].index);
    const name = NAMES[mark] ?? "code";
    if (isBlank(inner) || (name !== "code" && inner !== inner.trim())) continue;
    parent.append(text.slice(done, marks[place].index));
    parent.append(name === "code" ? element("code", inner) : withInline(element(name), inner));
    done = start + inner.length + mark.length;
    place = partner;
  }
  parent.append(text.slice(done));
  return parent;
}

const NAMES = { "**": "strong", "*": "em" }; // any other mark is a run of backticks

/** For each mark, the index of the next equal mark. */
function partnersOf(marks) {
  const next = new Map();
  const partners = new Array(marks.length);
  for (let place = marks.length - 1; place >= 0; place--) {
    partners[place] = next.get(marks[place]);
    next.set(marks[place], place);
  }
  return partners;
}

function element(name, text = "") {
  const element = document.createElement(name);
  element.textContent = text;
  return element;
}
