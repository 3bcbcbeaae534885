"""litellm: chat, stream, a loop of two turns with a real function, Anthropic's API, and structured output."""

# pyright: reportMissingImports=false, reportArgumentType=false

import json
import sys

import litellm
from weather import TOOL, City, get_weather

url, model, structured = sys.argv[1], sys.argv[2], sys.argv[3] == "structured"
common = {"model": f"openai/{model}", "api_base": f"{url}/v1", "api_key": "none", "num_retries": 0}
HELLO = [{"role": "user", "content": "Hello"}]
WEATHER = [{"role": "user", "content": "Weather?"}]

whole = litellm.completion(messages=HELLO, **common)
assert whole.choices[0].message.content == "Hello there.", whole
assert whole.usage.completion_tokens > 0
pieces = list(litellm.completion(messages=HELLO, stream=True, **common))
assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == "Hello there."

messages = list(WEATHER)
first = litellm.completion(messages=messages, tools=[TOOL], **common).choices[0]
assert first.finish_reason == "tool_calls", first
[call] = first.message.tool_calls
output = get_weather(**json.loads(call.function.arguments))
messages += [first.message.model_dump(), {"role": "tool", "tool_call_id": call.id, "content": output}]
second = litellm.completion(messages=messages, tools=[TOOL], **common)
assert second.choices[0].message.content == "It is sunny.", second

there = {"model": f"anthropic/{model}", "api_base": url, "api_key": "none", "max_tokens": 50}
assert litellm.completion(messages=HELLO, **there).choices[0].message.content == "Hello there."
if structured:
    answer = litellm.completion(messages=[{"role": "user", "content": "A city"}], response_format=City, **common)
    assert City.model_validate_json(answer.choices[0].message.content) == City(name="Oslo", celsius=3)
