"""Common code of all client scripts: a function, its declaration, and a type for structured output."""

from pydantic import BaseModel


class City(BaseModel):
    name: str
    celsius: int


def get_weather(city: str) -> str:
    """The weather of a city."""
    return f"sunny in {city}"


TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}
