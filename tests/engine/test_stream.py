"""Text as it is sent: whole characters, and nothing of a stop string."""

from __future__ import annotations

from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as FastTokenizer

from engine.models.tokenizer import Tokenizer
from engine.stream import TextStream


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> Tokenizer:
    return Tokenizer(tiny_model)


def pushed(stream: TextStream, ids: list[int]) -> list[str]:
    return [*(stream.push(i) for i in ids), stream.finish()]


def test_a_split_character_waits_for_its_last_byte(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("né 日🎉")
    parts = pushed(TextStream(tokenizer), ids)
    assert "".join(parts) == "né 日🎉"
    assert len(ids) > len("né 日🎉") and "" in parts
    assert not any("\ufffd" in part for part in parts)


def test_a_character_whose_end_never_comes_is_not_shown(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a🎉")[:-1]
    assert "".join(pushed(TextStream(tokenizer), ids)) == "a"


def test_special_tokens_are_not_text(tokenizer: Tokenizer) -> None:
    special = tokenizer.encode("<|end|>")
    assert len(special) == 1 and tokenizer.token_bytes(special[0]) == b""
    assert "".join(pushed(TextStream(tokenizer), [*tokenizer.encode("a"), *special, *tokenizer.encode("b")])) == "ab"


@settings(max_examples=300, deadline=None, derandomize=True)
@given(ids=st.lists(st.integers(0, 511), max_size=40))
def test_whatever_comes_joins_to_the_tokenizers_own_decoding(ids: list[int]) -> None:
    tokenizer = CACHE["tokenizer"]
    text = "".join(pushed(TextStream(tokenizer), ids))
    whole = tokenizer.decode(ids)
    assert whole.startswith(text)
    assert whole[len(text) :].strip("\ufffd") == "" and len(whole) - len(text) <= 3, "only a last, unfinished character"


CACHE: dict[str, Tokenizer] = {}


@pytest.fixture(scope="module", autouse=True)
def _kept_for_hypothesis(tokenizer: Tokenizer) -> None:
    CACHE["tokenizer"] = tokenizer


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    text=st.text(st.sampled_from("abc "), max_size=30),
    stops=st.lists(st.text("abc ", min_size=1, max_size=4), max_size=3),
)
def test_the_text_ends_before_the_stop_string_that_is_complete_first(text: str, stops: list[str]) -> None:
    tokenizer = CACHE["tokenizer"]
    stream = TextStream(tokenizer, stops)
    sent = "".join(pushed(stream, tokenizer.encode(text)))
    places = [(text.index(s) + len(s), text.index(s)) for s in stops if s in text]
    assert stream.stopped == bool(places)
    assert sent == (text[: min(places)[1]] if places else text)


def test_what_may_begin_a_stop_string_is_held_back(tokenizer: Tokenizer) -> None:
    stream = TextStream(tokenizer, ["END"])
    letters = [tokenizer.encode(c)[0] for c in "xENxEND"]
    assert [stream.push(i) for i in letters] == ["x", "", "", "ENx", "", "", ""]
    assert stream.stopped


def test_a_stop_string_may_be_kept_in_the_text(tokenizer: Tokenizer) -> None:
    stream = TextStream(tokenizer, ["lazy"], include_stop=True)
    assert "".join(pushed(stream, tokenizer.encode("the lazy dog"))) == "the lazy"


def test_stop_strings_count_from_the_least_number_of_tokens_on(tokenizer: Tokenizer) -> None:
    ids = [tokenizer.encode(c)[0] for c in "xyxyxy"]
    stream = TextStream(tokenizer, ["xy"], min_tokens=4)
    assert "".join(pushed(stream, ids)) == "xy" and stream.stopped


def test_sentencepiece_text_streams_too(tmp_path: Path, tiny_model: Path) -> None:
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), "▁the", "▁", "dog", "▁fox"]
    fast = FastTokenizer(models.BPE({p: i for i, p in enumerate(pieces)}, [], byte_fallback=True, unk_token="<unk>"))
    fast.add_special_tokens([AddedToken(t, special=True) for t in ("<unk>", "<s>", "</s>")])
    fast.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    for name in ("config.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((tiny_model / name).read_bytes())
    fast.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer(tmp_path)
    ids = [1, pieces.index("▁the"), pieces.index("▁fox"), *(pieces.index(f"<0x{b:02X}>") for b in "é".encode())]
    assert tokenizer.decode(ids) == "the foxé"
    assert pushed(TextStream(tokenizer), ids) == ["", "the", " fox", "", "é", ""]
