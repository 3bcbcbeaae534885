"""langchain-openai: both of its image messages, whole and streamed, in chats and responses."""

# pyright: reportMissingImports=false, reportArgumentType=false

import sys

from langchain_core.messages import HumanMessage
from langchain_openai import ChatOpenAI

url, model, picture, question, wanted = sys.argv[1:]
common = {
    "model": model,
    "base_url": f"{url}/v1",
    "api_key": "none",
    "max_retries": 0,
    "temperature": 0,
    "max_tokens": 6,
}
parts = (
    {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{picture}"}},
    {"type": "image", "base64": picture, "mime_type": "image/png"},
    {"type": "image", "source_type": "base64", "data": picture, "mime_type": "image/png"},
)

for chat in (ChatOpenAI(**common), ChatOpenAI(**common, use_responses_api=True)):
    num_text = chat.invoke(question).usage_metadata["input_tokens"]
    for part in parts:
        message = HumanMessage([part, {"type": "text", "text": question}])
        answer = chat.invoke([message])
        assert answer.text == wanted, (part["type"], answer.text)
        assert answer.usage_metadata["input_tokens"] > num_text + 8, "the tokens of the image count"
        assert "".join(piece.text for piece in chat.stream([message])) == wanted
