// The last request as a program: a curl command, or Python with the openai package.

/** Return a shell command that sends this request. The key is read from the environment. */
export function asCurl(body, hasKey) {
  const key = hasKey ? ` \\\n  -H "Authorization: Bearer $API_KEY"` : "";
  const text = JSON.stringify(body, null, 2).replaceAll("'", `'\\''`);
  return `curl -N ${address("v1/chat/completions")} \\\n  -H 'Content-Type: application/json'${key} \\\n  -d '${text}'\n`;
}

/** Return a Python program that sends this request with the openai package and prints the answer. */
export function asPython(body, hasKey) {
  const { messages, stream, stream_options: options, chat_template_kwargs: template, ...rest } = body;
  const key = hasKey ? `os.environ["API_KEY"]` : `"none"`;
  const lines = Object.entries(rest).map(([name, value]) => `    ${name}=${literal(value)},\n`).join("");
  return `${hasKey ? "import os\n\n" : ""}import openai

client = openai.OpenAI(base_url="${address("v1")}", api_key=${key})
stream = client.chat.completions.create(
    model="default",
    messages=${literal(messages)},
${lines}    extra_body={"chat_template_kwargs": ${literal(template)}},
    stream=True,
)
for chunk in stream:
    if chunk.choices:
        print(chunk.choices[0].delta.content or "", end="", flush=True)
print()
`;
}

function address(path) {
  return new URL(path, document.baseURI).href;
}

/** Return a value as Python writes it. */
function literal(value) {
  if (value === null || value === undefined) return "None";
  if (typeof value === "boolean") return value ? "True" : "False";
  if (Array.isArray(value)) return `[${value.map(literal).join(", ")}]`;
  if (typeof value === "object") {
    return `{${Object.entries(value).map(([name, each]) => `${literal(name)}: ${literal(each)}`).join(", ")}}`;
  }
  return JSON.stringify(value); // texts and numbers: JSON's escapes are Python's too
}
