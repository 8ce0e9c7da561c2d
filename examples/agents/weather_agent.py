"""A LangChain agent with a tool, over any OpenAI-shaped server: python weather_agent.py URL MODEL QUESTION [--stream]

Needs langchain-openai. The model's calls arrive as calls, also where the engine itself passes on only its text: then
the pool has a tool_parser.
"""

import argparse
import json

from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

TURNS_MAX = 8


@tool
def get_weather(city: str, days: int = 1) -> str:
    """Tell the weather of a city for some days."""
    return json.dumps({"city": city, "days": days, "sky": "clear", "degrees": 21})


def answer_of(model: object, messages: list[BaseMessage], stream: bool) -> AIMessage | AIMessageChunk:
    """Ask the model once."""
    if not stream:
        return model.invoke(messages)  # type: ignore[attr-defined, no-any-return]
    whole: AIMessageChunk | None = None
    for chunk in model.stream(messages):  # type: ignore[attr-defined]
        whole = chunk if whole is None else whole + chunk
    assert whole is not None, "the stream was empty"
    return whole


def run(url: str, model_name: str, question: str, stream: bool) -> tuple[str, list[str]]:
    """Let the model call the tool until it answers; return its answer and the calls."""
    chat = ChatOpenAI(
        base_url=f"{url}/v1",
        api_key="none",  # type: ignore[arg-type]
        model=model_name,
        stream_usage=True,
        extra_body={"prompt_cache_key": "weather-1", "metadata": {"program_id": "weather"}},
    )
    model = chat.bind_tools([get_weather])
    messages: list[BaseMessage] = [HumanMessage(question)]
    calls: list[str] = []
    for _ in range(TURNS_MAX):
        answer = answer_of(model, messages, stream)
        messages.append(answer)
        if not answer.tool_calls:
            return str(answer.content), calls
        for call in answer.tool_calls:
            calls.append(f"{call['name']}({json.dumps(call['args'])})")
            messages.append(ToolMessage(get_weather.invoke(call["args"]), tool_call_id=call["id"]))
    raise RuntimeError(f"no answer after {TURNS_MAX} turns")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("model")
    parser.add_argument("question")
    parser.add_argument("--stream", action="store_true")
    given = parser.parse_args()
    text, made = run(given.url, given.model, given.question, given.stream)
    print(json.dumps({"answer": text, "calls": made}))
