// A client of the server's API: one chat completion as a stream of events.

/** A refused or interrupted request. `status` is 0 if the server could not be reached. */
export class ServerError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** The events of one streamed chat completion, parsed. Aborting `signal` ends it with an AbortError. */
export async function* complete(body, { key, signal }) {
  const options = {
    method: "POST",
    headers: { "content-type": "application/json", ...keyHeader(key) },
    body: JSON.stringify(body),
    signal,
  };
  const response = await reach("v1/chat/completions", options);
  for await (const data of eventData(response.body)) {
    if (data === "[DONE]") return;
    const event = JSON.parse(data);
    if (event.error) throw new ServerError(response.status, messageOf(event) ?? "The answer was interrupted.");
    yield event;
  }
  throw new ServerError(0, "The connection was lost before the answer was complete.");
}

/** Facts about the server: its model's name, context length and more. */
export async function serverInfo(key) {
  const response = await reach("server_info", { headers: keyHeader(key) });
  return response.json();
}

/** The current state of the engine; see /live. */
export async function liveState(key, texts) {
  const response = await reach(`live_state${texts ? "?texts=true" : ""}`, { headers: keyHeader(key) });
  return response.json();
}

// UTF-8 bytes as characters up to 255: keys may have any characters, headers only these.
function keyHeader(key) {
  if (!key) return {};
  return { authorization: `Bearer ${String.fromCharCode(...new TextEncoder().encode(key))}` };
}

async function reach(path, options) {
  let response;
  try {
    response = await fetch(path, { cache: "no-store", credentials: "omit", ...options });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError(0, "Cannot reach the server.");
  }
  if (response.ok) return response;
  const said = await response.json().catch(() => null);
  throw new ServerError(response.status, messageOf(said) ?? `The server answered with status ${response.status}.`);
}

/** Return the message of an error body of the server. */
function messageOf(body) {
  const error = body?.error ?? body;
  return typeof error === "string" ? error : error?.message;
}

async function* eventData(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await read(reader);
      if (done) return;
      const frames = (rest + value).split("\n\n");
      rest = frames.pop();
      for (const frame of frames) if (frame.startsWith("data: ")) yield frame.slice(6);
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

async function read(reader) {
  try {
    return await reader.read();
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError(0, "The connection was lost before the answer was complete.");
  }
}
