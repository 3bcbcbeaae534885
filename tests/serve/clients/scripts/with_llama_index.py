"""llama-index: chat, stream and completion."""

# pyright: reportMissingImports=false

import sys

from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike

url, model = sys.argv[1], sys.argv[2]
common = {"model": model, "api_base": f"{url}/v1", "api_key": "none", "max_tokens": 50}
hello = [ChatMessage(role="user", content="Hello")]
chats = OpenAILike(is_chat_model=True, **common)
assert chats.chat(hello).message.content == "Hello there."
assert "".join(piece.delta or "" for piece in chats.stream_chat(hello)) == "Hello there."
assert OpenAILike(is_chat_model=False, **common).complete("Hello").text == "Hello there."
