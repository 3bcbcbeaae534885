"""The page's API requests, and its handling of answers that the scripted engine cannot generate."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from browser import ENTER, Open, Page
from serve.page import page_routes

IDLE = '!document.body.classList.contains("running")'
CALL = {"index": 0, "id": "call-1", "type": "function", "function": {"name": "get_time", "arguments": '{"ci'}}
CALL_REST = {"index": 0, "function": {"arguments": 'ty": "Rome"}'}}


class RecordedApi:
    """Records the bodies of chat requests, and answers each with the next scripted list of deltas."""

    def __init__(self, *answers: list[dict[str, Any]]) -> None:
        self.bodies: list[dict[str, Any]] = []
        self._answers = list(answers)
        self.app = Starlette(
            routes=[
                *page_routes(),
                Route("/server_info", self._info),
                Route("/v1/chat/completions", self._complete, methods=["POST"]),
            ]
        )

    async def _info(self, http: HttpRequest) -> Response:
        return JSONResponse({"served_model_name": "recorded", "cache_report": False})

    async def _complete(self, http: HttpRequest) -> Response:
        self.bodies.append(orjson.loads(await http.body()))
        deltas = self._answers.pop(0)
        finish = "tool_calls" if any("tool_calls" in delta for delta in deltas) else "stop"
        choices = [{"delta": delta, "finish_reason": None} for delta in deltas]
        events = [{"choices": [choice]} for choice in [*choices, {"delta": {}, "finish_reason": finish}]]
        frames = [b": ping\n\n", *(b"data: " + orjson.dumps(event) + b"\n\n" for event in events)]
        return Response(b"".join([*frames, b"data: [DONE]\n\n"]), media_type="text/event-stream")


async def ask(page: Page, text: str, *, count: int = 1) -> None:
    """Send a message and wait until there are `count` answers."""
    await page.type("#prompt", text + ENTER)
    await page.until(f'document.querySelectorAll(".answer").length === {count} && {IDLE}')


async def test_untouched_settings_leave_the_choice_to_the_server(open_page: Open) -> None:
    api = RecordedApi([{"content": "Yes."}])
    page = await open_page(api.app)
    await ask(page, "Hello")
    assert api.bodies[0] == {
        "messages": [{"role": "user", "content": "Hello"}],
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        "chat_template_kwargs": {"enable_thinking": False},
    }


async def test_settings_are_sent(open_page: Open) -> None:
    api = RecordedApi([{"content": "Yes."}])
    page = await open_page(api.app)
    await page.type("#system", "Be brief.")
    await page.type("#temperature", "0.3")
    await page.type("#max-tokens", "64")
    await page.click("#thinking")
    await page.click("#offer-tools")
    await page.click("#use-schema")
    await ask(page, "Hello")
    [body] = api.bodies
    wanted = body["response_format"]
    assert wanted["type"] == "json_schema"
    assert wanted["json_schema"]["schema"]["required"] == ["answer", "sure"]
    assert body["messages"][0] == {"role": "system", "content": "Be brief."}
    assert (body["temperature"], body["max_tokens"]) == (0.3, 64)
    assert body["chat_template_kwargs"] == {"enable_thinking": True}
    assert [tool["function"]["name"] for tool in body["tools"]] == ["get_weather", "get_time"]


@pytest.mark.parametrize(
    ("switch", "field", "value"),
    [
        (None, "#temperature", "9"),
        (None, "#max-tokens", "0"),
        ("#offer-tools", "#tools", "x"),
        ("#use-schema", "#schema", "x"),
    ],
)
async def test_setting_that_cannot_be_sent_is_said_and_the_message_kept(
    open_page: Open, switch: str | None, field: str, value: str
) -> None:
    api = RecordedApi()
    page = await open_page(api.app)
    if switch:
        await page.click(switch)
    await page.type(field, value)
    await page.type("#prompt", "Hello" + ENTER)
    assert await page.text("#settings-error") != ""
    assert await page.value('document.querySelector("#prompt").value') == "Hello"
    assert api.bodies == []


async def test_conversation_and_thoughts_go_back_with_the_next_message(open_page: Open) -> None:
    api = RecordedApi(
        [{"content": "<think>\nHm.\n</think>\n\nOne."}],
        [{"reasoning_content": "Well."}, {"content": "Two."}],
        [{"content": "left open by the template</think>Three."}],
        [{"content": "Four."}],
    )
    page = await open_page(api.app)
    for count, question in enumerate("abcd", start=1):
        await ask(page, question, count=count)
    assert api.bodies[-1]["messages"] == [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "One.", "reasoning_content": "Hm."},
        {"role": "user", "content": "b"},
        {"role": "assistant", "content": "Two.", "reasoning_content": "Well."},
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": "Three.", "reasoning_content": "left open by the template"},
        {"role": "user", "content": "d"},
    ]


async def test_tool_call_is_shown_and_its_result_goes_back(open_page: Open) -> None:
    api = RecordedApi([{"tool_calls": [CALL]}, {"tool_calls": [CALL_REST]}], [{"content": "In Rome it is 9:00."}])
    page = await open_page(api.app)
    await page.click("#offer-tools")
    await ask(page, "What time is it in Rome?")
    assert await page.text(".call code") == '{"city": "Rome"}'
    assert await page.text("[data-figure=finish] dd") == "tool_calls"
    await page.type(".call input", '{"time": "9:00"}' + ENTER)
    await page.until(f'document.querySelectorAll(".answer").length === 2 && {IDLE}')
    function = {"name": "get_time", "arguments": '{"city": "Rome"}'}
    asked = {"id": "call-1", "type": "function", "function": function}
    assert api.bodies[1]["messages"][1:] == [
        {"role": "assistant", "content": "", "tool_calls": [asked]},
        {"role": "tool", "tool_call_id": "call-1", "content": '{"time": "9:00"}'},
    ]
    assert api.bodies[1]["tools"] == api.bodies[0]["tools"]
    assert await page.text(".answer:last-child .text") == "In Rome it is 9:00."


async def test_stream_that_breaks_off_is_said_to_have(open_page: Open) -> None:
    async def broken(http: HttpRequest) -> Response:
        event = {"choices": [{"delta": {"content": "Half"}, "finish_reason": None}]}
        return Response(b"data: " + orjson.dumps(event) + b"\n\n", media_type="text/event-stream")

    page = await open_page(Starlette(routes=[*page_routes(), Route("/v1/chat/completions", broken, methods=["POST"])]))
    await ask(page, "Hello")
    assert await page.text(".answer .text") == "Half"
    assert "lost" in await page.text(".answer .error")
