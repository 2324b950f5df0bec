"""An agent that runs anywhere: OpenAI's client, a tool, and nothing of the trainer until the last line."""

import json
import sys

from openai import OpenAI

STOCK = {"apples": 12, "pears": 7, "plums": 31, "figs": 5, "melons": 3, "grapes": 48, "limes": 19}
TOOL = {
    "type": "function",
    "function": {
        "name": "stock",
        "description": "Look up how many of an item the shop has.",
        "parameters": {"type": "object", "properties": {"item": {"type": "string"}}, "required": ["item"]},
    },
}


def answer(question: str) -> str:
    """Query the policy until it stops calling tools."""
    client = OpenAI()  # reads OPENAI_BASE_URL and OPENAI_API_KEY
    messages = [{"role": "user", "content": f"{question} Look up each, then answer with the number alone."}]
    while True:
        reply = client.chat.completions.create(model="policy", messages=messages, tools=[TOOL])
        message = reply.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:
            return message.content or ""
        for call in message.tool_calls:
            item = str(json.loads(call.function.arguments).get("item"))
            result = str(STOCK.get(item, f"no {item} here"))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


if __name__ == "__main__":
    row = json.loads(sys.stdin.readline())  # the problem, its answer, further columns
    given = answer(row["problem"])
    print(json.dumps({"reward": float(given.strip().rstrip(".") == row["answer"])}))
