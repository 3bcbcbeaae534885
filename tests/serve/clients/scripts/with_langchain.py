"""langchain-openai: chat, stream, a loop of two turns with a real function, the responses API, structured output."""

# pyright: reportMissingImports=false, reportArgumentType=false

import sys

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from weather import City, get_weather

url, model, structured = sys.argv[1], sys.argv[2], sys.argv[3] == "structured"
common = {"model": model, "base_url": f"{url}/v1", "api_key": "none", "max_retries": 0}

for chat in (ChatOpenAI(**common), ChatOpenAI(**common, use_responses_api=True)):
    assert chat.invoke("Hello").text == "Hello there."
    assert "".join(piece.text for piece in chat.stream("Hello")) == "Hello there."
    able = chat.bind_tools([tool(get_weather)])
    messages = [HumanMessage("Weather?")]
    messages.append(able.invoke(messages))
    [call] = messages[-1].tool_calls
    messages.append(ToolMessage(get_weather(**call["args"]), tool_call_id=call["id"]))
    assert able.invoke(messages).text == "It is sunny."
    if structured:
        made = chat.with_structured_output(City, method="json_schema").invoke("A city")
        assert made == City(name="Oslo", celsius=3), made
