// The conversation and the settings of this tab, kept over a reload in sessionStorage.

const CHAT = "penstock-chat";
const FIELDS = "penstock-settings";

/** Keep the messages of the conversation. One that is too large for the storage is not kept. */
export function saveChat(messages) {
  try {
    if (messages.length) sessionStorage.setItem(CHAT, JSON.stringify(messages));
    else sessionStorage.removeItem(CHAT);
  } catch {
    sessionStorage.removeItem(CHAT);
  }
}

/** Return the messages that were kept, or []. */
export function savedChat() {
  const kept = read(CHAT);
  return Array.isArray(kept) ? kept : [];
}

/** Keep the values of these fields whenever one changes, and fill them with the values that were kept. */
export function keepFields(fields) {
  const kept = read(FIELDS) ?? {};
  for (const field of fields) {
    const name = field.type === "checkbox" ? "checked" : "value";
    if (field.id in kept && typeof kept[field.id] === typeof field[name]) {
      field[name] = kept[field.id];
      field.dispatchEvent(new Event("change"));
    }
    field.addEventListener("change", () => {
      kept[field.id] = field[name];
      try {
        sessionStorage.setItem(FIELDS, JSON.stringify(kept));
      } catch {
        sessionStorage.removeItem(FIELDS);
      }
    });
  }
}

function read(name) {
  try {
    return JSON.parse(sessionStorage.getItem(name));
  } catch {
    return null;
  }
}
