"""Conversations to token ids and loss mask, by the target's own chat template.

The mask is never guessed. For each assistant turn the prompt (rendered with the generation header) must be a prefix, in token ids, of the
conversation up to that turn, and that again of the whole; the answer is what lies between, up to and with its end-of-turn token. What a
template writes after the end-of-turn (ChatML's newline) is not supervised: the model stops before it. Templates without an end-of-turn
token end an answer with the next role's tag, which is not supervised either. An empty think block that the template puts in of its own is
context, not answer. A row for which this does not hold is rejected with the reason.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jinja2
from transformers import AutoTokenizer, GenerationConfig

from mtp_train.data.corpus import BadRow
from mtp_train.interfaces import Conversation, Reject, TokenRow

Message = dict[str, Any]

ENDS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|eot|>", "<end_of_turn>", "<turn|>", "<|return|>", "<|call|>", "<|END_OF_TURN_TOKEN|>", "<|end|>")
"""Tokens that end a turn in one family or another, beside its eos."""
OPENERS = (
    "<|im_start|>", "<|start_header_id|>", "<|header_start|>", "<start_of_turn>", "<|turn>", "<|start|>", "<|start_of_role|>", "<|START_OF_TURN_TOKEN|>",
    "[INST]", "<|user|>", "<|assistant|>", "<|User|>", "<｜User｜>",
)  # fmt: skip
"""Texts that begin a turn in one family or another."""
RESERVED = {"tokenize", "add_generation_prompt", "continue_final_message", "return_dict", "return_tensors", "return_assistant_tokens_mask"} | {
    "conversation", "padding", "truncation", "max_length", "tokenizer_kwargs",
}  # fmt: skip
OPEN, CLOSE = "<think>", "</think>"
EMPTY_THINK = re.compile(rf"\s*({OPEN})?\s*{CLOSE}\s*")  # the prompt may have opened it already
LONGEST_THINK = 64  # tokens an empty think block has at most


def check_template(tokenizer: Any, template_kwargs: dict[str, Any] | None = None) -> None:
    """Raise ValueError when the tokenizer has no chat template, or `template_kwargs` are not the template's to read."""
    kwargs = template_kwargs or {}
    if clash := sorted(RESERVED & kwargs.keys()):
        raise ValueError(f"template_kwargs sets {', '.join(clash)}, which mtp-train sets itself: give only what the template reads")
    try:
        tokenizer.get_chat_template(kwargs.get("chat_template"), kwargs.get("tools"))
    except ValueError as error:
        name = getattr(tokenizer, "name_or_path", "?")
        raise ValueError(
            f"the tokenizer of {name!r} has no chat template to use: take the target's instruct tokenizer, or form=text for plain text ({error})"
        ) from error


def _render(messages: Sequence[Message], tokenizer: Any, kwargs: dict[str, Any], generation: bool) -> list[int]:
    """Token ids of rendered messages, whatever container this version of the library returns them in."""
    try:
        out = tokenizer.apply_chat_template(list(messages), tokenize=True, add_generation_prompt=generation, **kwargs)
    except jinja2.TemplateSyntaxError as error:
        raise ValueError(f"the chat template is not valid: {error}") from error
    except Exception as error:  # a template is a program of its own: whatever it raises is about this row
        raise BadRow("the chat template refuses the row", f"{type(error).__name__}: {error}") from error
    ids = out["input_ids"] if hasattr(out, "keys") else out
    ids = ids[0] if len(ids) and isinstance(ids[0], list) else ids
    assert all(isinstance(id, int) for id in ids), f"a template gives token ids, not {type(out).__name__}"
    return list(ids)


def prompt_ids(messages: Iterable[Message], tokenizer: Any, template_kwargs: dict[str, Any] | None = None) -> list[int]:
    """The generation prompt of a conversation that ends with a user or tool turn. Training, regeneration and evaluation all use this.

    Raises BadRow when the template refuses the messages, ValueError when there is no template.
    """
    check_template(tokenizer, template_kwargs)
    return _render(list(messages), tokenizer, template_kwargs or {}, generation=True)


def _decode(tokenizer: Any, ids: Sequence[int], skip_special: bool = False) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=skip_special, clean_up_tokenization_spaces=False))


def _in_vocab(tokenizer: Any, tokens: Iterable[str]) -> dict[str, int]:
    """Those of `tokens` that the tokenizer has as one token, with their ids."""
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in tokens}
    return {token: id for token, id in ids.items() if id is not None and tokenizer.convert_ids_to_tokens(id) == token}


def stop_ids(tokenizer: Any, generation_config: Any = None) -> frozenset[int]:
    """The tokens that end an answer: the tokenizer's eos, the model's generation eos, and known end-of-turn tokens of the vocabulary."""
    known = _in_vocab(tokenizer, ENDS)
    if "<|return|>" in known:
        known.pop("<|end|>", None)  # harmony: it ends a channel, and the answer goes on
    found = set(known.values())
    for value in (tokenizer.eos_token_id, getattr(generation_config, "eos_token_id", None)):
        found |= {value} if isinstance(value, int) else set(value or ())
    return frozenset(found)


def open_tokenizer(folder: Path) -> tuple[Any, frozenset[int]]:
    """A target's tokenizer, and the tokens that end its answers."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    generation = GenerationConfig.from_pretrained(folder) if (folder / "generation_config.json").exists() else None
    return tokenizer, stop_ids(tokenizer, generation)


def _end_of_turn(span: list[int], tokenizer: Any) -> int:
    """Length of an answer with its end-of-turn: the first known end among the special and blank tokens it closes with, else the last
    special one, else (a template without end-of-turn) all of it."""
    ends = {*_in_vocab(tokenizer, ENDS).values(), tokenizer.eos_token_id}
    specials: list[int] = []
    for index in range(len(span) - 1, -1, -1):
        if span[index] in ends or (_decode(tokenizer, [span[index]]).strip() and not _decode(tokenizer, [span[index]], skip_special=True)):
            specials.append(index)
        elif _decode(tokenizer, [span[index]]).strip():
            break
    known = [index for index in specials if span[index] in ends]
    return (known[-1] if known else specials[0] if specials else len(span) - 1) + 1


def _inserted_think(span: list[int], message: Message, tokenizer: Any) -> int:
    """Tokens of the empty think block that the template, not the answer, begins with."""
    if CLOSE in message["content"] or message.get("reasoning_content") or not EMPTY_THINK.match(_decode(tokenizer, span[:LONGEST_THINK])):
        return 0
    return max((n for n in range(1, min(len(span), LONGEST_THINK) + 1) if EMPTY_THINK.fullmatch(_decode(tokenizer, span[:n]))), default=0)


def _check_answer(messages: Sequence[Message], span: list[int], prompt: list[int], upto: list[int], tokenizer: Any, kwargs: dict[str, Any]) -> None:
    """Raise BadRow where the last message is not what was rendered of it."""
    before, answer = messages[:-1], messages[-1]
    content = answer["content"].strip()
    for token in _in_vocab(tokenizer, (*ENDS, *OPENERS, tokenizer.eos_token or "")):
        if token in content:
            raise BadRow("the answer holds a token that ends or begins turns", token)
    if content and not _decode(tokenizer, span).lstrip().startswith(content[:20]) and _render(before, tokenizer, kwargs, generation=False) == prompt:
        raise BadRow("the template has no generation prompt", "the answer's header cannot be told from the answer")
    if answer.get("reasoning_content"):
        bare = {key: value for key, value in answer.items() if key != "reasoning_content"}
        if _render([*before, bare], tokenizer, kwargs, generation=False) == upto:
            raise BadRow("the template drops the reasoning")
    if content.count(CLOSE) == 1:
        old, new = _decode(tokenizer, _render(before, tokenizer, kwargs, generation=False)), _decode(tokenizer, upto)
        if any(new.count(tag) - old.count(tag) != 1 for tag in (OPEN, CLOSE)):
            raise BadRow("think tags do not match", "expected one opening and one closing tag in the rendered answer")


def _answer_span(messages: Sequence[Message], full: list[int], tokenizer: Any, kwargs: dict[str, Any]) -> tuple[int, int]:
    """Token range, within `full`, of the answer that is the last message; end-of-turn included."""
    turn = f"assistant turn at message {len(messages) - 1}"
    prompt = _render(messages[:-1], tokenizer, kwargs, generation=True)
    upto = _render(messages, tokenizer, kwargs, generation=False)
    if upto[: len(prompt)] != prompt:
        raise BadRow("the prompt is not a prefix of the conversation", turn)
    span = upto[len(prompt) :]
    if not span:
        raise BadRow("the template renders no answer", turn)
    _check_answer(messages, span, prompt, upto, tokenizer, kwargs)
    start, stop = len(prompt) + _inserted_think(span, messages[-1], tokenizer), len(prompt) + _end_of_turn(span, tokenizer)
    if full[:stop] != upto[:stop]:
        raise BadRow("the template rewrites earlier turns (try turns=last)", turn)
    return start, stop


def _readings(messages: Sequence[Message], tokenizer: Any, kwargs: dict[str, Any]) -> list[list[Message]]:
    """The messages as a template may want them. An answer with only its closing think tag (the prompt had the opening one, so a recorded
    answer lacks it) gets it back in the text or, for templates that put it there themselves, becomes a reasoning field."""
    lone = [m["role"] == "assistant" and m["content"].count(CLOSE) == 1 and OPEN not in m["content"] for m in messages]
    if not any(lone):
        return [list(messages)]
    prompt = _decode(tokenizer, _render(messages[: lone.index(True)], tokenizer, kwargs, generation=True))
    opening = found.group() if (found := re.search(rf"{OPEN}\s*$", prompt)) else f"{OPEN}\n"
    whole = [{**m, "content": opening + m["content"]} if is_lone else m for m, is_lone in zip(messages, lone)]
    apart = []
    for message, is_lone in zip(messages, lone):
        thought, _, rest = message["content"].partition(CLOSE)
        apart.append({**message, "reasoning_content": thought.strip(), "content": rest.lstrip()} if is_lone else message)
    return [whole, apart]


def _supervise(messages: list[Message], tokenizer: Any, turns: str, kwargs: dict[str, Any]) -> tuple[list[int], list[bool]]:
    answers = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    if not answers:
        raise BadRow("no assistant turn")
    # What follows the last answer teaches nothing, and templates drop an answer's thinking once a user turn follows it.
    full = _render(messages[: answers[-1] + 1], tokenizer, kwargs, generation=False)
    mask = [False] * len(full)
    for turn in answers if turns == "all" else answers[-1:]:
        start, stop = _answer_span(messages[: turn + 1], full, tokenizer, kwargs)
        mask[start:stop] = [True] * (stop - start)
    return full, mask


def _chat(messages: Sequence[Message], tokenizer: Any, turns: str, kwargs: dict[str, Any]) -> tuple[list[int], list[bool]]:
    check_template(tokenizer, kwargs)
    *others, last = _readings(messages, tokenizer, kwargs)
    for reading in others:
        try:
            return _supervise(reading, tokenizer, turns, kwargs)
        except BadRow:  # the next reading fits, or its reason is reported
            continue
    return _supervise(last, tokenizer, turns, kwargs)


def _text(text: str, tokenizer: Any) -> tuple[list[int], list[bool]]:
    """Plain text, trained on whole but for the first token, which nothing predicts."""
    if found := [marker for marker in OPENERS if marker in text]:
        raise BadRow("plain text is a rendered conversation", f"it holds {found[0]}: its answers cannot be told apart, give messages")
    try:
        ids = list(tokenizer(text, verbose=False)["input_ids"])
    except (TypeError, UnicodeEncodeError) as error:
        raise BadRow("text is not valid Unicode", str(error)) from error
    if len(ids) > 1 and ids[0] == ids[1] == tokenizer.bos_token_id:
        ids = ids[1:]  # the text had its own
    return ids, [position > 0 for position in range(len(ids))]


def tokenize(
    conversation: Conversation, tokenizer: Any, *, max_length: int, turns: str = "all", template_kwargs: dict[str, Any] | None = None
) -> TokenRow | Reject:
    """One conversation to ids and loss mask.

    Args:
        conversation: chat messages or plain text (of which all tokens but the first are supervised).
        tokenizer: the target's.
        max_length: tokens; ids and mask are cut together.
        turns: "all" or "last": which assistant turns are supervised. Templates that drop earlier thinking need "last".
        template_kwargs: passed to the chat template.

    Raises:
        ValueError: the tokenizer has no valid chat template, or a setting is wrong.
    """
    if turns not in ("all", "last") or max_length < 1:
        raise ValueError(f"turns is {turns!r}, expected all or last; max_length is {max_length}, expected 1 or more")
    try:
        text, messages = conversation.text, conversation.messages
        ids, mask = _text(text, tokenizer) if text is not None else _chat(messages, tokenizer, turns, template_kwargs or {})
        if not any(mask):
            raise BadRow("no supervised token")
        if not any(mask[:max_length]):
            raise BadRow("no supervised token within max_length", f"{len(ids)} tokens, max_length {max_length}")
    except BadRow as bad:
        return Reject(conversation.where, bad.reason, bad.detail)
    return TokenRow(conversation.id, conversation.domain, ids[:max_length], mask[:max_length])


class Tally:
    """Counts rows in, rows out, rejects by reason, and rows that are used but not to their end, while rows stream through."""

    def __init__(self) -> None:
        self.rows_in, self.rows_out = 0, 0
        self.rejects: Counter[str] = Counter()
        self.shortened: Counter[str] = Counter()
        self.examples: list[Reject] = []

    def reject(self, reject: Reject) -> None:
        """Count a row that is not used."""
        self.rows_in += 1
        self._count(self.rejects, reject)

    def shorten(self, end: Reject) -> None:
        """Count that a row, counted as kept, is used only up to where `end` says why."""
        self._count(self.shortened, end)

    def _count(self, reasons: Counter[str], one: Reject) -> None:
        reasons[one.reason] += 1
        if reasons[one.reason] <= 3:
            self.examples.append(one)

    def keep(self) -> None:
        """Count a row that is used."""
        self.rows_in += 1
        self.rows_out += 1

    def rows(self, items: Iterable[TokenRow | Reject]) -> Iterator[TokenRow]:
        """Pass rows through and count."""
        for item in items:
            if isinstance(item, Reject):
                self.reject(item)
            else:
                self.keep()
                yield item

    def summary(self) -> dict[str, Any]:
        """rows_in = rows_out + sum of rejects; what is shortened is among rows_out."""
        assert self.rows_in == self.rows_out + sum(self.rejects.values())
        examples = [f"{one.where}: {one.reason}{f' ({one.detail})' if one.detail else ''}" for one in self.examples]
        counts = {"rejects": dict(self.rejects), "shortened": dict(self.shortened)}
        return {"rows_in": self.rows_in, "rows_out": self.rows_out, **counts, "examples": examples}

    def check(self, what: str) -> None:
        """Raise ValueError when nothing is left to train on."""
        if self.rows_out == 0:
            reasons = "; ".join(self.summary()["examples"]) or "the source is empty"
            raise ValueError(f"{what}: 0 supervised tokens, none of {self.rows_in} rows can be used: {reasons}")
