// Vercel's ai with its OpenAI-compatible provider: text, stream, an agent's loop with a real function, an object.
import assert from "node:assert/strict";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const [url, model, structured] = process.argv.slice(2);
const provider = createOpenAICompatible({
  name: "penstock",
  baseURL: `${url}/v1`,
  apiKey: "none",
  supportsStructuredOutputs: true,
  includeUsage: true,
});
const chat = provider(model);
const options = { model: chat, maxRetries: 0 };

assert.equal((await generateText({ ...options, prompt: "Hello" })).text, "Hello there.");
let text = "";
for await (const piece of streamText({ ...options, prompt: "Hello" }).textStream) text += piece;
assert.equal(text, "Hello there.");

const tools = {
  get_weather: tool({
    description: "The weather of a city.",
    inputSchema: z.object({ city: z.string() }),
    execute: async ({ city }) => `sunny in ${city}`,
  }),
};
const loop = { ...options, prompt: "Weather?", tools, stopWhen: stepCountIs(3) };
const done = await generateText(loop);
assert.equal(done.text, "It is sunny.");
assert.equal(done.steps.length, 2);
const streamed = streamText(loop);
await streamed.consumeStream();
assert.equal(await streamed.text, "It is sunny.");
assert.ok((await streamed.totalUsage).outputTokens > 0);

await assert.rejects(generateText({ ...options, prompt: "Hello", temperature: -1 }), /temperature must be/);
if (structured === "structured") {
  const schema = z.object({ name: z.string(), celsius: z.number().int() });
  const { object } = await generateObject({ ...options, schema, prompt: "A city" });
  assert.deepEqual(object, { name: "Oslo", celsius: 3 });
}
