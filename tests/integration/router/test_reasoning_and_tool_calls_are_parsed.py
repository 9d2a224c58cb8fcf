"""vLLM's own parsers on the TileRT path: reasoning and tool calls, streamed or not, whatever the bursts."""

from __future__ import annotations

import ast
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest
from tokenizers import AddedToken, Tokenizer

from integration.router.parts import CHAT, Bench, Up, write_tokenizer
from tilert_router import parsing
from tilert_router.config import ConfigError, Model
from tilert_router.parsing import load_parsing

pytest.importorskip("vllm")

TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            },
        },
    }
]


@dataclass(frozen=True)
class Family:
    reasoning_parser: str
    tool_parser: str
    special: tuple[str, ...]
    think: str
    call: str
    kwargs: dict[str, Any]


D = "｜DSML｜"
FAMILIES = {
    "glm5": Family(
        "glm47",
        "glm47",
        ("<think>", "</think>", *(f"<{e}{t}>" for t in ("tool_call", "arg_key", "arg_value") for e in ("", "/"))),
        "Ünder 天气?</think>",
        "<tool_call>weather<arg_key>city</arg_key><arg_value>{city}</arg_value>"
        "<arg_key>days</arg_key><arg_value>3</arg_value></tool_call>",
        {},
    ),
    "dsv32": Family(
        "deepseek_v3",
        "deepseek_v32",
        ("<think>", "</think>", D),
        "Ünder 天气?</think>",
        f'<{D}function_calls>\n<{D}invoke name="weather">\n'
        f'<{D}parameter name="city" string="true">{{city}}</{D}parameter>\n'
        f'<{D}parameter name="days" string="false">3</{D}parameter>\n</{D}invoke>\n</{D}function_calls>',
        {"chat_template_kwargs": {"thinking": True}},
    ),
}  # fmt: skip


class Scripted:
    """A router whose node answers with a given text."""

    def __init__(self, bench: Bench, url: str, tokenizer: Tokenizer, family: Family) -> None:
        self.bench, self.url, self.family = bench, url, family
        self._tokenizer = tokenizer
        self.client = openai.AsyncOpenAI(base_url=url + "/v1", api_key="none", max_retries=0)

    def says(self, text: str, burst: int = 1) -> int:
        """The node answers `text`; returns its tokens."""
        ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        self.bench.nodes[0].script, self.bench.nodes[0].burst = ids, burst
        self.bench.prefill.first_token = ids[0]
        return len(ids)

    async def ask(self, stream: bool, **more: Any) -> tuple[str, str, list[tuple[str, str]], str]:
        """Reasoning, content, calls and finish reason, put together as a client would."""
        body: Any = {**CHAT, "max_tokens": 500, "stream": stream}
        extra = {**self.family.kwargs, **more.pop("extra", {})}
        answer = await self.client.chat.completions.create(**body | more, extra_body=extra)
        if not stream:
            choice = answer.choices[0]
            calls = [(c.function.name, c.function.arguments) for c in choice.message.tool_calls or []]
            assert all(c.id and c.type == "function" for c in choice.message.tool_calls or [])
            reasoning = getattr(choice.message, "reasoning", None) or ""
            return reasoning, choice.message.content or "", calls, choice.finish_reason
        reasoning, content, finish, found = "", "", "", {}
        async for chunk in answer:
            for choice in chunk.choices:
                reasoning += getattr(choice.delta, "reasoning", None) or ""
                content += choice.delta.content or ""
                finish = choice.finish_reason or finish
                for call in choice.delta.tool_calls or []:
                    name, arguments = found.get(call.index, ("", ""))
                    found[call.index] = (
                        name + (call.function.name or ""),
                        arguments + (call.function.arguments or ""),
                    )
        return reasoning, content, [found[i] for i in sorted(found)], finish


@pytest.fixture(scope="module", params=list(FAMILIES))
def family(request: pytest.FixtureRequest) -> Family:
    return FAMILIES[request.param]


@pytest.fixture(scope="module")
def folder(family: Family, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in family.special])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    (folder / "config.json").write_text('{"model_type": "llama"}')
    return folder


@pytest.fixture
async def scripted(up: Up, family: Family, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Scripted:
    bench = await up(1)
    model = bench.config()["model"] | {
        "tokenizer": str(folder),
        "reasoning_parser": family.reasoning_parser,
        "tool_parser": family.tool_parser,
    }
    url = await bench.router(model=model)
    return Scripted(bench, url, Tokenizer.from_file(str(folder / "tokenizer.json")), family)


def arguments(calls: list[tuple[str, str]]) -> list[tuple[str, Any]]:
    return [(name, json.loads(text)) for name, text in calls]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("burst", [1, 3, 1000])
async def test_thought_words_and_calls_are_told_apart(scripted: Scripted, burst: int, stream: bool) -> None:
    family = scripted.family
    scripted.says(family.think + "Let me look: 😀" + family.call.format(city="北京"), burst)
    reasoning, content, calls, finish = await scripted.ask(stream, tools=TOOLS)
    assert reasoning == "Ünder 天气?"
    assert content.strip() == "Let me look: 😀"
    assert arguments(calls) == [("weather", {"city": "北京", "days": 3})]
    assert finish == "tool_calls"
    # Prefill renders the tools and parses nothing.
    assert scripted.bench.prefill.bodies[-1]["tools"] == TOOLS
    assert scripted.bench.prefill.bodies[-1]["tool_choice"] == "none"


@pytest.mark.parametrize("stream", [False, True])
async def test_plain_words_stay_words(scripted: Scripted, stream: bool) -> None:
    scripted.says(scripted.family.think + "Just 3 < 4 words.", 2)
    for tools in ({"tools": TOOLS}, {}):
        reasoning, content, calls, finish = await scripted.ask(stream, **tools)
        assert (reasoning, content, calls, finish) == ("Ünder 天气?", "Just 3 < 4 words.", [], "stop")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_that_is_cut_ends_with_length(scripted: Scripted, stream: bool) -> None:
    family = scripted.family
    whole = scripted.says(family.think + family.call.format(city="Paris"), 2)
    _, content, _, finish = await scripted.ask(stream, tools=TOOLS, max_tokens=whole - 12)
    assert finish == "length"
    assert not any(mark in content for mark in family.special)


@pytest.mark.parametrize("stream", [False, True])
async def test_two_calls_or_only_the_first(scripted: Scripted, stream: bool) -> None:
    family = scripted.family
    both = family.call.format(city="Paris") + family.call.format(city="Rome")
    if family.tool_parser == "deepseek_v32":
        end, begin = f"\n</{D}function_calls>", f"<{D}function_calls>\n"
        both = both.replace(end + begin, "\n")
    scripted.says(family.think + both, 4)
    _, _, calls, finish = await scripted.ask(stream, tools=TOOLS)
    assert [a["city"] for _, a in arguments(calls)] == ["Paris", "Rome"]
    _, _, calls, finish = await scripted.ask(stream, tools=TOOLS, parallel_tool_calls=False)
    assert [a["city"] for _, a in arguments(calls)] == ["Paris"]
    assert finish == "tool_calls"


@pytest.mark.parametrize("stream", [False, True])
async def test_reasoning_is_left_out_where_that_is_asked(scripted: Scripted, stream: bool) -> None:
    scripted.says(scripted.family.think + "Words.", 1)
    reasoning, content, _, _ = await scripted.ask(stream, extra={"include_reasoning": False})
    assert (reasoning, content) == ("", "Words.")


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
async def test_forced_and_strict_calls_are_refused_by_name_or_go_native(
    scripted: Scripted, choice: Any
) -> None:
    scripted.says("x")
    with pytest.raises(openai.BadRequestError) as refused:
        await scripted.ask(False, tools=TOOLS, tool_choice=choice)
    assert refused.value.param in ("tool_choice", "tools")
    strict = [{"type": "function", "function": TOOLS[0]["function"] | {"strict": True}}]
    with pytest.raises(openai.BadRequestError) as refused:
        await scripted.ask(False, tools=strict)
    assert refused.value.param == "tools"


async def test_text_that_cannot_be_parsed_is_an_error_and_not_an_answer(
    scripted: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.parser.abstract_parser import DelegatingParser

    def broken(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("quotes the private answer")

    monkeypatch.setattr(DelegatingParser, "parse_delta", broken)
    monkeypatch.setattr(DelegatingParser, "parse", broken)
    scripted.says(scripted.family.think + "private words")
    for stream in (False, True):
        with pytest.raises(openai.APIError) as failed:
            await scripted.ask(stream)
        assert "private" not in str(failed.value)
    monkeypatch.undo()
    assert (await scripted.ask(False))[1] == "private words"


async def test_without_parsers_tools_are_refused_and_markup_is_content(up: Up, folder: Path) -> None:
    bench = await up(1)
    url = await bench.router()
    status, _, raw = await bench.post(url, CHAT | {"tools": TOOLS})
    assert (status, json.loads(raw)["error"]["param"]) == (400, "tools")


def test_a_wrong_name_or_a_missing_vllm_is_said_at_start(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def model(**parsers: str) -> Model:
        return Model(name="m", tokenizer=folder, max_model_len=100, **parsers)

    assert load_parsing(model()) is None
    with pytest.raises(ConfigError, match=r"reasoning_parser.*nonsense"):
        load_parsing(model(reasoning_parser="nonsense"))
    monkeypatch.setattr(parsing.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="router-parsing"):
        load_parsing(model(tool_parser="glm47"))


def test_vllm_is_imported_in_one_module_only() -> None:
    folder = Path(parsing.__file__).parent
    importing = set()
    for path in folder.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            if any(name.split(".")[0] in ("vllm", "transformers", "torch") for name in names):
                importing.add(path.name)
    assert importing == {"vllm_parsing.py"}
