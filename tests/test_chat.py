"""The loss mask, against an oracle that never renders twice: the text of the mask must be the answers and their end-of-turn, nothing else."""

from __future__ import annotations

import pytest
from transformers import BatchEncoding, GenerationConfig

from mtp_train.data.chat import Tally, check_template, prompt_ids, stop_ids, tokenize
from mtp_train.data.corpus import BadRow
from mtp_train.interfaces import Conversation, Reject, TokenRow
from tests.toy import CHATML, QWEN, toy_tokenizer

RENDERED = {"chatml": "{}<|im_end|>", "upper": "{}<|im_end|>", "llama3": "{}<|eot_id|>", "no_end": "{}", "inst": " {}</s>", "gptoss": "{}<|return|>"}
FIELD_ONLY = CHATML.replace("m['content']", "(('<think>' + (m.reasoning_content or '') + '</think>' if m.role == 'assistant' else '') + m.content)")


def chat(*texts, system=None, text=None, **last):
    """user, assistant, user, ... with extra keys on the last message."""
    messages = [{"role": ("user", "assistant")[n % 2], "content": one} for n, one in enumerate(texts)]
    if last:
        messages[-1] |= last
    first = [] if system is None else [{"role": "system", "content": system}]
    return Conversation("a:1", "a", tuple(first + messages), "a.jsonl:1", text)


def row_of(conversation, template="chatml", max_length=10_000, **options):
    got = tokenize(conversation, tokenizer_of(template), max_length=max_length, **options)
    assert isinstance(got, TokenRow), got
    return got


def reject_of(conversation, template="chatml", max_length=10_000, **options):
    got = tokenize(conversation, tokenizer_of(template), max_length=max_length, **options)
    assert isinstance(got, Reject) and got.where == conversation.where, got
    return got


def tokenizer_of(template):
    return toy_tokenizer(template) if isinstance(template, str) else template


def spans(row, tokenizer):
    """The texts of the runs of supervised tokens."""
    found, run = [], []
    for id, on in [*zip(row.input_ids, row.loss_mask), (0, False)]:
        if on:
            run.append(id)
        elif run:
            found.append(tokenizer.decode(run))
            run = []
    return found


def supervised(conversation, template="chatml", **options):
    return spans(row_of(conversation, template, **options), tokenizer_of(template))


# ---------------------------------------------------------------- what is supervised


@pytest.mark.parametrize("template", RENDERED)
@pytest.mark.parametrize("answers", [("ho", "fine"), ("é日本", "x"), ("two\nlines", "a  b"), ("?", "1")])
def test_every_answer_and_its_end_of_turn_and_nothing_else(template, answers):
    """D08, D12, D13, D17: under every family's manner, one-token answers included."""
    first, second = answers
    assert supervised(chat("hi", first, "and you", second), template) == [RENDERED[template].format(answer) for answer in answers]


@pytest.mark.parametrize("template", ["chatml", "llama3", "gptoss", "no_end", "upper", "two_ends", "inst", "qwen"])
def test_the_ids_are_the_librarys_and_the_prompt_is_inferences(template):
    """D19, D30: the row is the template's own rendering, and begins with the ids that inference is given."""
    tokenizer, conversation = toy_tokenizer(template), chat("hi", " .ho ")
    row = row_of(conversation, template, template_kwargs={"enable_thinking": False})
    assert row.input_ids == tokenizer.apply_chat_template(list(conversation.messages), return_dict=False, enable_thinking=False)
    start = row.loss_mask.index(True)
    assert row.input_ids[:start] == prompt_ids(conversation.messages[:1], tokenizer, {"enable_thinking": False})
    assert 0 < sum(row.loss_mask) < len(row.loss_mask)


def test_a_prompt_of_three_and_an_answer_of_two():
    """D07: tokens 3 and 4 are targets, the first of them too."""
    row = row_of(chat("u", "a"), "{% for m in messages %}{{ 'U' + m.content + ':' if m.role == 'user' else m.content + '<|im_end|>' }}{% endfor %}")
    assert (len(row.input_ids), row.loss_mask) == (5, [False, False, False, True, True])


@pytest.mark.parametrize("answer", ["ends with a space ", " begins with one", "\nline", "x"])
def test_blanks_at_the_edges_stay_out_of_the_next_turn(answer):
    """D13."""
    assert supervised(chat("hi", answer, "more", "b")) == [answer + "<|im_end|>", "b<|im_end|>"]
    assert supervised(chat("hi", answer, "more", "b"), "llama3") == [answer.strip() + "<|eot_id|>", "b<|eot_id|>"]


def test_what_follows_the_first_end_is_not_supervised():
    """Phi-like: an end-of-turn, a newline and the eos close the conversation; the model stops at the first."""
    assert supervised(chat("hi", "ho"), "two_ends") == ["ho<|im_end|>"]
    assert supervised(chat("hi", "ho", "hi", "ha"), "two_ends", turns="last") == ["ha<|im_end|>"]


def test_an_end_of_turn_of_an_unknown_name():
    tokenizer = toy_tokenizer(CHATML.replace("<|im_end|>", "<|over|>"))
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|over|>"]})
    assert supervised(chat("hi", "ho", "hi", "ha"), tokenizer) == ["ho<|over|>", "ha<|over|>"]


def test_no_end_of_turn_leaves_the_next_role_tag_alone():
    """D17: the terminator is the next role's tag; it is not supervised."""
    row = row_of(chat("hi", "ho", "and", "fine"), "no_end")
    tags = [on for id, on in zip(row.input_ids, row.loss_mask) if id == toy_tokenizer().convert_tokens_to_ids("<|start|>")]
    assert tags == [False] * 4 and supervised(chat("hi", "ho", "and", "fine"), "no_end") == ["ho", "fine"]


def test_tool_turns_are_context():
    calls = [{"name": "f", "arguments": {"x": 1}}]
    messages = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "content": "r"},
        {"role": "assistant", "content": "s"},
    ]
    conversation = Conversation("a", "a", tuple(messages), "a:1")
    assert supervised(conversation, QWEN.replace("{% if loop.last %}", "{% if false %}")) == ['<call>f{"x": 1}</call><|im_end|>', "s<|im_end|>"]


def test_turns_last_is_one_span_and_the_end_of_the_row():
    assert supervised(chat("hi", "ho", "and", "fine"), turns="last") == ["fine<|im_end|>"]
    assert row_of(chat("hi", "ho", "and")).input_ids == row_of(chat("hi", "ho")).input_ids  # an unanswered question teaches nothing


# ---------------------------------------------------------------- thinking


def test_dropped_thinking_rejects_all_turns_and_keeps_the_last():
    """D21: earlier answers differ from what the model produced."""
    conversation = chat("q", "<think>\nw\n</think>\n\na", "q", "<think>\nv\n</think>\n\nb", "q", "<think>\nu\n</think>\n\nc")
    got = reject_of(conversation, "qwen")
    assert "turns=last" in got.reason
    assert supervised(conversation, "qwen", turns="last") == ["<think>\nu\n</think>\n\nc<|im_end|>"]
    assert supervised(Conversation("a", "a", conversation.messages + conversation.messages[:1], "a:1"), "qwen", turns="last") == [
        "<think>\nu\n</think>\n\nc<|im_end|>"
    ]


@pytest.mark.parametrize("key", ["reasoning_content", None])
def test_reasoning_is_rendered_and_supervised(key):
    """D20, D29."""
    conversation = chat("q", "a", reasoning_content="hm") if key else chat("q", "<think>\nhm\n</think>\n\na")
    assert supervised(conversation, "qwen") == ["<think>\nhm\n</think>\n\na<|im_end|>"]
    assert reject_of(conversation, "qwen", template_kwargs={"enable_thinking": False}).reason == "the prompt is not a prefix of the conversation"


def test_reasoning_that_the_template_drops_is_said():
    """D20: never silently."""
    assert reject_of(chat("q", "a", reasoning_content="hm")).reason == "the template drops the reasoning"
    assert reject_of(chat("q", "<think>hm</think>a"), CHATML.replace("m['content']", "m['content'].split('</think>')[-1]")).reason == "think tags do not match"


@pytest.mark.parametrize(
    ("template", "kwargs"),
    [("qwen", {}), ("qwen", {"enable_thinking": False}), ("thinking", {}), (QWEN.replace("\\n\\n</think>\\n\\n", "\\n"), {"enable_thinking": False})],
)
def test_the_empty_think_block_of_the_template_is_not_supervised(template, kwargs):
    """D22: whether the prompt or the rendered answer brings it."""
    assert supervised(chat("q", " a" if template == "thinking" else "a"), template, template_kwargs=kwargs) == [
        (" a" if template == "thinking" else "a") + "<|im_end|>"
    ]


def test_an_empty_block_that_the_answer_has_is_supervised():
    assert supervised(chat("q", "<think></think>a")) == ["<think></think>a<|im_end|>"]


@pytest.mark.parametrize(
    ("template", "kwargs", "answer"),
    [
        ("prompt_thinks", {}, "hm\n</think>\n\na<|im_end|>"),  # the prompt opens the block
        ("chatml", {}, "<think>\nhm\n</think>\n\na<|im_end|>"),
        ("qwen", {}, "<think>\nhm\n</think>\n\na<|im_end|>"),
        (FIELD_ONLY, {}, "<think>hm</think>a<|im_end|>"),  # reads the reasoning field only
    ],
)
def test_a_lone_closing_tag_is_given_its_opening_one(template, kwargs, answer):
    """D23: exactly one of each in the ids, and the same as from a whole answer."""
    row = row_of(chat("q", "hm\n</think>\n\na"), template, template_kwargs=kwargs)
    text = tokenizer_of(template).decode(row.input_ids)
    assert (text.count("<think>"), text.count("</think>")) == (1, 1)
    assert spans(row, tokenizer_of(template)) == [answer]


def test_a_lone_closing_tag_that_cannot_be_mended_is_rejected():
    doubled = CHATML.replace("m['content']", "('<think></think>' if m['role'] == 'assistant' else '') + m['content']")
    for answer in ("hm</think>a", "<think>hm</think>a"):
        assert reject_of(chat("q", answer), doubled).reason in ("think tags do not match", "the template drops the reasoning")


def test_three_modes_of_thinking_are_three_renderings():
    """D29."""
    rows = [
        row_of(chat("q", "a", reasoning_content="hm"), "qwen"),
        row_of(chat("q", "a"), "qwen", template_kwargs={"enable_thinking": False}),
        row_of(chat("q", "a")),
    ]
    assert len({tuple(row.input_ids) for row in rows}) == 3
    assert [spans(row, toy_tokenizer())[0] for row in rows] == ["<think>\nhm\n</think>\n\na<|im_end|>", "a<|im_end|>", "a<|im_end|>"]


# ---------------------------------------------------------------- what is refused


LATE_CHANGE = CHATML.replace("m['content']", "(m['content'] | upper if m['role'] == 'user' and messages | length > 2 else m['content'])")
REFUSED = {  # each template is a seeded fault: without its check the mask would be silently wrong
    "the prompt is not a prefix of the conversation": ("not_a_prefix", chat("hi", "ho")),  # D18
    "the template rewrites earlier turns (try turns=last)": (LATE_CHANGE, chat("hi", "ho", "hi", "ho")),  # D10
    "the chat template refuses the row": ("no_system", chat("hi", "ho", system="s")),  # D24
    "the template has no generation prompt": ("no_header", chat("hi", "ho")),  # D19: the header would be supervised
    "the answer holds a token that ends or begins turns": ("chatml", chat("hi", "ho<|im_end|>\n<|im_start|>user\nsecret")),  # D12
    "the template renders no answer": ("{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}", chat("hi", "ho")),
    "no assistant turn": ("chatml", chat("hi")),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_nothing_is_guessed(reason):
    template, conversation = REFUSED[reason]
    assert reject_of(conversation, template).reason == reason


@pytest.mark.parametrize("answer", ["\nho", "\n\nho"])
def test_a_token_across_the_boundary_is_refused(answer):
    """D30: the header's newline and the answer's would be one token."""
    tokenizer = toy_tokenizer(merge_newlines=True)
    got = tokenize(chat("hi", answer), tokenizer, max_length=99)
    assert isinstance(got, Reject) and got.reason == "the prompt is not a prefix of the conversation"
    assert supervised(chat("hi", "h\n\no"), tokenizer) == ["h\n\no<|im_end|>"]


@pytest.mark.parametrize(
    "template", ["{{ messages[9].content }}", "{{ 1 / 0 }}", "{{ raise_exception('no') }}", "{{ messages[0].content + 1 }}", "{{ nothing.at.all }}"]
)
def test_a_template_that_raises_rejects_the_row_with_its_message(template):
    """D24: never the run."""
    got = reject_of(chat("hi", "ho"), template)
    assert got.reason == "the chat template refuses the row" and got.detail


@pytest.mark.parametrize("messages", [(), ({"role": "assistant", "content": "x"}, {"role": "user", "content": "y"}), ({"role": "system", "content": "s"},)])
def test_odd_conversations_do_not_crash(messages):
    """D01, D13: were they to come past the corpus reader."""
    assert isinstance(tokenize(Conversation("a", "a", messages, "a:1"), toy_tokenizer(), max_length=99), Reject)


def test_what_is_wrong_for_every_row_stops_the_run():
    for template, kwargs, words in [
        ("none", {}, "no chat template"),
        ("{% for %}", {}, "not valid"),
        ("{{ x | nofilter }}", {}, "not valid"),
        ("chatml", {"tokenize": False}, "sets tokenize"),
    ]:
        with pytest.raises(ValueError, match=words):
            tokenize(chat("hi", "ho"), toy_tokenizer(template), max_length=99, template_kwargs=kwargs)
        with pytest.raises(ValueError, match=words):
            prompt_ids(chat("hi").messages, toy_tokenizer(template), kwargs)
    with pytest.raises(ValueError, match="add_generation_prompt, max_length"):
        check_template(toy_tokenizer(), {"max_length": 3, "add_generation_prompt": True})
    check_template(toy_tokenizer("none"), {"chat_template": CHATML})
    for options in ({"turns": "first", "max_length": 9}, {"max_length": 0}):
        with pytest.raises(ValueError, match="expected all or last"):
            tokenize(chat("hi", "ho"), toy_tokenizer(), **options)


# ---------------------------------------------------------------- lengths


def test_truncation_cuts_ids_and_mask_together():
    """D14, D16, D31: an answer of 50 cut to 20 has 20 targets; a limit that cuts nothing changes nothing."""
    whole = row_of(chat("hi", "x" * 50))
    start = whole.loss_mask.index(True)
    cut = row_of(chat("hi", "x" * 50), max_length=start + 20)
    assert (len(cut.input_ids), sum(cut.loss_mask)) == (start + 20, 20) and cut.input_ids == whole.input_ids[: start + 20]
    assert row_of(chat("hi", "x" * 50), max_length=len(whole.input_ids)) == row_of(chat("hi", "x" * 50), max_length=8192) == whole


@pytest.mark.parametrize("conversation", [chat("u" * 200, "a"), chat("u" * 200, "a", "b", "c"), chat(text="plain" * 50)])
@pytest.mark.parametrize("max_length", [1, 2, 64, 230])
@pytest.mark.parametrize("turns", ["all", "last"])
def test_no_row_is_too_long_or_without_a_target(conversation, max_length, turns):
    """D15, D31."""
    got = tokenize(conversation, toy_tokenizer(), max_length=max_length, turns=turns)
    if isinstance(got, Reject):
        assert got.reason == "no supervised token within max_length" and f"max_length {max_length}" in got.detail
    else:
        assert len(got.input_ids) == len(got.loss_mask) <= max_length and any(got.loss_mask)


# ---------------------------------------------------------------- plain text, BOS


def test_plain_text_is_supervised_but_for_its_first_token():
    row = row_of(chat(text="abc"), toy_tokenizer("none", bos=True))
    assert (row.input_ids, row.loss_mask) == (toy_tokenizer(bos=True)("abc")["input_ids"], [False, True, True, True])
    assert reject_of(chat(text="a")).reason == "no supervised token"
    assert reject_of(chat(text="a\ud800b")).reason == "text is not valid Unicode"


@pytest.mark.parametrize("template", ["chatml", "llama3", "gptoss", "inst"])
def test_a_rendered_conversation_is_no_plain_text(template):
    """D04, D12: its user turns would be supervised; the run stops."""
    text = toy_tokenizer(template).apply_chat_template(list(chat("hi", "ho").messages), tokenize=False)
    tally = Tally()
    assert list(tally.rows([tokenize(chat(text=text), toy_tokenizer("chatml"), max_length=99)])) == []
    with pytest.raises(ValueError, match=r"train: 0 supervised tokens.*rendered conversation"):
        tally.check("train")


@pytest.mark.parametrize("bos", [True, False])
def test_bos_is_there_once(bos):
    """D28: in rows, prompts and plain text, whoever adds it."""
    tokenizer = toy_tokenizer("llama3", bos=bos)
    rows = [row_of(chat("hi", "ho"), tokenizer).input_ids, prompt_ids(chat("hi").messages, tokenizer), row_of(chat(text="<s>abc"), tokenizer).input_ids]
    assert [ids.count(tokenizer.bos_token_id) for ids in rows] == [1, 1, 1]


# ---------------------------------------------------------------- prompts, stops, counts


class Returning:
    """A tokenizer whose apply_chat_template returns another container, as other versions of the library do."""

    def __init__(self, wrap):
        self.inner, self.wrap = toy_tokenizer(), wrap

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def apply_chat_template(self, messages, **options):
        return self.wrap(self.inner.apply_chat_template(messages, return_dict=False, **options))


@pytest.mark.parametrize(
    "wrap",
    [
        list,
        lambda ids: {"input_ids": ids},
        lambda ids: {"input_ids": [ids]},
        lambda ids: BatchEncoding({"input_ids": ids, "attention_mask": [1] * len(ids)}),
        lambda ids: [ids],
    ],
)
def test_whatever_the_library_returns_the_ids_are_a_list(wrap):
    """D19."""
    tokenizer = Returning(wrap)
    assert prompt_ids(chat("hi").messages, tokenizer) == prompt_ids(chat("hi").messages, toy_tokenizer())
    assert tokenize(chat("hi", "ho"), tokenizer, max_length=99) == row_of(chat("hi", "ho"))


def test_prompts_that_the_template_refuses_are_bad_rows():
    with pytest.raises(BadRow, match="refuses"):
        prompt_ids(chat("hi", system="s").messages, toy_tokenizer("no_system"))
    with pytest.raises(BadRow, match="refuses"):
        prompt_ids([], toy_tokenizer())


def test_stop_tokens():
    tokenizer = toy_tokenizer("no_end")
    names = lambda ids: {tokenizer.convert_ids_to_tokens(id) for id in ids}  # noqa: E731
    assert names(stop_ids(tokenizer)) == {"</s>", "<|im_end|>", "<|eot_id|>", "<|return|>"}
    assert names(stop_ids(tokenizer, GenerationConfig(eos_token_id=[0, 1]))) - names(stop_ids(tokenizer)) == {"!", '"'}
    assert stop_ids(tokenizer, GenerationConfig(eos_token_id=0)) == stop_ids(tokenizer) | {0}
    assert stop_ids(tokenizer, GenerationConfig()) == stop_ids(tokenizer)
    harmony = toy_tokenizer("gptoss")
    harmony.add_special_tokens({"additional_special_tokens": ["<|end|>", "<|call|>"]})
    ids = stop_ids(harmony)
    assert harmony.convert_tokens_to_ids("<|call|>") in ids and harmony.convert_tokens_to_ids("<|end|>") not in ids  # it ends a channel only


def test_a_saved_tokenizer_gives_the_same_rows(tmp_path):
    from transformers import AutoTokenizer

    tokenizer = toy_tokenizer("llama3", bos=True)
    tokenizer.save_pretrained(tmp_path)
    assert row_of(chat("hi", "日本"), AutoTokenizer.from_pretrained(tmp_path)) == row_of(chat("hi", "日本"), tokenizer)


def test_changing_limit_template_or_tokenizer_changes_the_rows():
    """D27: nothing is cached."""
    rows = [
        row_of(chat("hi", "ho", "a", "b")),
        row_of(chat("hi", "ho", "a", "b"), max_length=40),
        row_of(chat("hi", "ho", "a", "b"), "llama3"),
        row_of(chat("hi", "ho", "a", "b"), turns="last"),
    ]
    assert len({(tuple(row.input_ids), tuple(row.loss_mask)) for row in rows}) == 4


def test_tally():
    """D02, D03: rows in = rows out + rejects, with the first examples of each reason."""
    tally = Tally()
    rows = (
        [tokenize(chat("hi", "ho"), toy_tokenizer(), max_length=99)] * 10 + [Reject(f"a:{n}", "empty answer", "x") for n in range(5)] + [Reject("b:1", "odd")]
    )
    assert len(list(tally.rows(rows))) == 10
    tally.shorten(Reject("c:1", "no room"))
    tally.check("train")
    assert tally.summary() == {
        "rows_in": 16, "rows_out": 10, "rejects": {"empty answer": 5, "odd": 1}, "shortened": {"no room": 1},
        "examples": ["a:0: empty answer (x)", "a:1: empty answer (x)", "a:2: empty answer (x)", "b:1: odd", "c:1: no room"],
    }  # fmt: skip
    tally.rejects["odd"] += 1  # a row counted twice
    with pytest.raises(AssertionError):
        tally.summary()
    with pytest.raises(ValueError, match=r"0 supervised tokens, none of 0 rows.*empty"):
        Tally().check("train")
