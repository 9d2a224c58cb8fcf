"""From token ids to the text a client sees: incremental detokenising, stop strings and stop tokens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final, Protocol

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

_PRIMING_TOKENS: Final = 32
"""Prompt tokens before the answer that can change how its first characters are written."""
_INVALID_PREFIX: Final = "Invalid prefix encountered"


class Detokenizer(Protocol):
    """Token ids in, text out; text comes when it is whole (no half characters)."""

    def step(self, token_ids: Sequence[int]) -> str:
        """Text that `token_ids` complete; empty while a character is still open."""
        ...


def load_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer in `folder`/tokenizer.json."""
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


class StreamDetokenizer:
    """`tokenizers`' decode stream, primed with the prompt's end as vLLM primes its own."""

    __slots__ = ("_skip", "_stream", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int], skip_special: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special
        self._stream = DecodeStream(ids=list(prompt_ids[-_PRIMING_TOKENS:]), skip_special_tokens=skip_special)

    def step(self, token_ids: Sequence[int]) -> str:
        """Text completed by `token_ids`."""
        tokenizer, text = self._tokenizer, ""
        for token in token_ids:
            try:
                text += self._stream.step(tokenizer, token) or ""
            except (OverflowError, TypeError):
                continue  # not a token id; it has no text
            except Exception as error:
                if not str(error).startswith(_INVALID_PREFIX):
                    raise
                # Byte sequences that never become valid UTF-8 break the stream's state; start afresh.
                self._stream = DecodeStream(skip_special_tokens=self._skip)
                text += self._stream.step(tokenizer, token) or ""
        return text


class Output:
    """One answer as it grows.

    `push` returns the text that may be shown. With stop strings, text that could still become one is
    held back; once one is complete, `stopped` is true and later tokens are not counted. `count` is the
    number of tokens of the answer, those of a stop string or stop token included, as vLLM counts.
    """

    __slots__ = (
        "_detokenizer",
        "_held",
        "_include_stop",
        "_stop",
        "_stop_ids",
        "count",
        "kept",
        "stop_reason",
        "stopped",
    )

    def __init__(
        self,
        detokenizer: Detokenizer,
        stop: Sequence[str] = (),
        stop_token_ids: frozenset[int] = frozenset(),
        include_stop: bool = False,
    ) -> None:
        self._detokenizer = detokenizer
        self._stop = tuple(stop)
        self._stop_ids = stop_token_ids
        self._include_stop = include_stop
        self._held = ""
        self.count = 0
        self.kept: list[int] = []
        """Token ids counted by the last `push`."""
        self.stopped = False
        self.stop_reason: str | int | None = None

    def push(self, token_ids: Sequence[int]) -> str:
        """Add tokens; returns the text to show now."""
        if self.stopped:
            self.kept = []
            return ""
        if not self._stop and not self._stop_ids:
            self.count += len(token_ids)
            self.kept = list(token_ids)
            return self._detokenizer.step(token_ids)
        shown = ""
        self.kept = []
        for token in token_ids:
            self.count += 1
            self.kept.append(token)
            if token in self._stop_ids:
                self.stopped, self.stop_reason = True, token
                if self._include_stop:
                    self._held += self._detokenizer.step((token,))
                return shown + self.flush()
            shown += self._search(self._detokenizer.step((token,)))
            if self.stopped:
                break
        return shown

    def flush(self) -> str:
        """Text still held back; to be shown when the answer ends without a stop string."""
        held, self._held = self._held, ""
        return held

    def _search(self, new: str) -> str:
        if not self._stop or not new:
            return new
        before = len(self._held)
        text = self._held + new
        best: tuple[int, int, str] | None = None
        for stop in self._stop:
            # What is held has no whole stop string in it, so a match ends inside what is new.
            at = text.find(stop, max(0, before - len(stop) + 1))
            if at >= 0 and (best is None or at + len(stop) < best[0]):
                best = (at + len(stop), at, stop)
        if best is not None:
            end, start, stop = best
            self._held = ""
            self.stopped, self.stop_reason = True, stop
            return text[: end if self._include_stop else start]
        show = len(text) - max(_overlap(text, stop) for stop in self._stop)
        self._held = text[show:]
        return text[:show]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a proper beginning of `stop`."""
    for size in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0
