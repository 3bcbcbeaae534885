// openai for Node: chat, stream, a loop of two turns with a real function, the responses API, an error's message.
import assert from "node:assert/strict";
import OpenAI from "openai";

const [url, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 });
const hello = [{ role: "user", content: "Hello" }];

const whole = await client.chat.completions.create({ model, messages: hello });
assert.equal(whole.choices[0].message.content, "Hello there.");
let text = "";
for await (const piece of await client.chat.completions.create({ model, messages: hello, stream: true })) {
  text += piece.choices[0]?.delta?.content ?? "";
}
assert.equal(text, "Hello there.");

const parameters = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };
const tool = {
  type: "function",
  function: { name: "get_weather", parameters, parse: JSON.parse, function: ({ city }) => `sunny in ${city}` },
};
for (const stream of [false, true]) {
  const messages = [{ role: "user", content: "Weather?" }];
  const runner = client.chat.completions.runTools({ model, messages, tools: [tool], stream });
  assert.equal(await runner.finalContent(), "It is sunny.");
}

const tools = [{ type: "function", name: "get_weather", parameters, strict: false }];
const first = await client.responses.create({ model, input: "Weather?", tools });
const [call] = first.output;
const output = `sunny in ${JSON.parse(call.arguments).city}`;
const stream = client.responses.stream({
  model,
  previous_response_id: first.id,
  input: [{ type: "function_call_output", call_id: call.call_id, output }],
  tools,
});
assert.equal((await stream.finalResponse()).output_text, "It is sunny.");

await assert.rejects(client.chat.completions.create({ model, messages: hello, temperature: -1 }), (error) => {
  assert.match(error.message, /temperature must be/);
  return error.status === 400;
});
