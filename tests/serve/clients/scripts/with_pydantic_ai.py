"""pydantic-ai: an agent with a real function, its stream, and structured output."""

# pyright: reportMissingImports=false, reportArgumentType=false

import asyncio
import sys

from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.profiles.openai import OpenAIModelProfile
from pydantic_ai.providers.openai import OpenAIProvider
from weather import City, get_weather

url, model, structured = sys.argv[1], sys.argv[2], sys.argv[3] == "structured"
# The scripted model has no tokens for the marks of calls, without which strict tools next to text are refused.
profile = OpenAIModelProfile(openai_supports_strict_tool_definition=False)
provider = OpenAIProvider(base_url=f"{url}/v1", api_key="none")


async def main() -> None:
    for kind in (OpenAIChatModel, OpenAIResponsesModel):
        chat = kind(model, provider=provider, profile=profile)
        plain = Agent(chat)
        assert (await plain.run("Hello")).output == "Hello there."
        async with plain.run_stream("Hello") as result:
            pieces = [piece async for piece in result.stream_text(delta=True)]
        assert "".join(pieces) == "Hello there.", pieces
        able = Agent(chat, tools=[get_weather])
        assert (await able.run("Weather?")).output == "It is sunny."
        if structured:
            made = (await Agent(chat, output_type=NativeOutput(City)).run("A city")).output
            assert made == City(name="Oslo", celsius=3), made


asyncio.run(main())
