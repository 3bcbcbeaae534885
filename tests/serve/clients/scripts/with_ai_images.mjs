// Vercel's ai with its OpenAI-compatible provider: images as base64 text, bytes and data URLs, whole and streamed.
import assert from "node:assert/strict";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, streamText } from "ai";

const [url, model, picture, question, wanted] = process.argv.slice(2);
const provider = createOpenAICompatible({ name: "penstock", baseURL: `${url}/v1`, apiKey: "none", includeUsage: true });
const options = { model: provider(model), maxRetries: 0, temperature: 0, maxOutputTokens: 6 };
const parts = [
  { type: "image", image: picture, mediaType: "image/png" },
  { type: "image", image: Buffer.from(picture, "base64") },
  { type: "image", image: `data:image/png;base64,${picture}` },
  { type: "file", data: picture, mediaType: "image/png" },
];
const { usage: text_usage } = await generateText({ ...options, prompt: question });
for (const part of parts) {
  const messages = [{ role: "user", content: [part, { type: "text", text: question }] }];
  const done = await generateText({ ...options, messages });
  assert.equal(done.text, wanted);
  assert.ok(done.usage.inputTokens > text_usage.inputTokens + 8, "the tokens of the image count");
  let text = "";
  for await (const piece of streamText({ ...options, messages }).textStream) text += piece;
  assert.equal(text, wanted);
}
