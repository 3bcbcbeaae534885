"""openai-agents: an agent with a real function over both APIs, whole and streamed, and structured output."""

# pyright: reportMissingImports=false, reportArgumentType=false

import asyncio
import sys

from agents import (
    Agent,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from weather import City, get_weather

url, model, structured = sys.argv[1], sys.argv[2], sys.argv[3] == "structured"
set_tracing_disabled(True)


async def main() -> None:
    client = AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    for kind in (OpenAIChatCompletionsModel, OpenAIResponsesModel):
        chat = kind(model=model, openai_client=client)
        tool = function_tool(get_weather, strict_mode=False)
        agent = Agent(name="weather", instructions="Be brief.", model=chat, tools=[tool])
        assert (await Runner.run(agent, "Weather?")).final_output == "It is sunny."
        streamed = Runner.run_streamed(agent, "Weather?")
        async for _ in streamed.stream_events():
            pass
        assert streamed.final_output == "It is sunny."
        if structured:
            maker = Agent(name="cities", model=chat, output_type=City)
            made = (await Runner.run(maker, "A city")).final_output
            assert made == City(name="Oslo", celsius=3), made


asyncio.run(main())
