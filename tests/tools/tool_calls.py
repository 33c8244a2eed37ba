"""Tools that tests offer to a model, as OpenAI's clients write them."""

from typing import Any

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city",
        "parameters": {
            "$defs": {"unit": {"enum": ["celsius", "kelvin"]}},
            "type": "object",
            "properties": {"city": {"enum": ["Oslo", "Rome"]}, "unit": {"$ref": "#/$defs/unit"}},
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
    },
}
TIME: dict[str, Any] = {"type": "function", "function": {"name": "get-time", "strict": True}}
TOOLS = [WEATHER, TIME]
NAMED: dict[str, Any] = {"type": "function", "function": {"name": "get_weather"}}
