"""instructor: structured output by schema, and by a tool call that is asked for by name."""

# pyright: reportMissingImports=false, reportArgumentType=false

import sys

import instructor
import openai
from weather import City

url, model, structured = sys.argv[1], sys.argv[2], sys.argv[3] == "structured"
client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
modes = [instructor.Mode.JSON_SCHEMA] if structured else []
for mode in [instructor.Mode.MD_JSON, *modes]:
    made = instructor.from_openai(client, mode=mode).chat.completions.create(
        model=model, messages=[{"role": "user", "content": "A city"}], response_model=City, max_retries=0
    )
    assert (made.name, made.celsius) == ("Oslo", 3), made
